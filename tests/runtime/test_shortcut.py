"""A recomputation that needs only a half's first sites runs them without the half's code, and every bit stays stock's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.site import ShortcutFinder, ShortcutStep, Site, SiteCall
from tests.runtime.tiny_half import ACTIVATION, FC1, NORM, RESIDUAL, WIDTH, TinyHalf, policy, reporting_to


class Run:
    """One half under a plan, or by itself, and how often its code ran."""

    def __init__(self, recompute: frozenset[str] | None) -> None:
        torch.manual_seed(1)
        engine = None if recompute is None else Engine()
        self.half = TinyHalf(None if engine is None else reporting_to(engine))
        self.calls = 0

        def code(hidden: Tensor) -> Tensor:
            self.calls += 1
            return self.half(hidden)  # type: ignore[no-any-return]

        self._half = code if engine is None else lambda hidden: engine.half(policy(recompute or ()), code, (hidden,), {})

    def __call__(self) -> list[Tensor]:
        """What a call returns, and all gradients."""
        torch.manual_seed(2)
        hidden = torch.randn(3, WIDTH, requires_grad=True)
        output = self._half(hidden)
        output.sum().backward()
        assert hidden.grad is not None
        found = [output.detach(), hidden.grad, *(gradient.clone() for gradient in self.half.gradients())]
        self.half.forget()
        return found


def calls_of_code(recompute: frozenset[str], change: Callable[[TinyHalf], None] = lambda half: None) -> list[int]:
    """How often the half's code ran in each of three steps, with recomputations; the model changes behind the first."""
    ours, stock, found = Run(recompute), Run(None), []
    for step in range(3):
        before = ours.calls
        assert all(torch.equal(one, other) for one, other in zip(ours(), stock(), strict=True)), step
        found.append(ours.calls - before)
        if step == 0:
            change(ours.half)
            change(stock.half)
    return found


@pytest.mark.parametrize("recompute", [frozenset({NORM}), frozenset({NORM, FC1})], ids=["norm", "norm+fc1"])
def test_the_first_sites_run_without_the_halfs_code(recompute: frozenset[str]) -> None:
    """Of linear_fc1, which is kept, its input is let go: it is what the norm returned."""
    assert calls_of_code(recompute) == [1, 1, 1]


@pytest.mark.parametrize("item", [ACTIVATION, RESIDUAL])
def test_what_the_code_between_sites_saved_takes_the_code(item: str) -> None:
    assert calls_of_code(frozenset({NORM, item})) == [2, 2, 2]


def test_a_site_that_is_handed_something_else_from_now_on() -> None:
    """The code comes to do something before its first site. Each call looks again."""

    def scaled(half: TinyHalf) -> None:
        usual = half._site
        half._site = lambda name, module, given: usual(name, module, given * 2.0 if name == NORM else given)  # type: ignore

    assert calls_of_code(frozenset({NORM}), scaled) == [1, 2, 2]


def site(name: str = "a site") -> Site:
    return Site(name, None, lambda given: given)


def followed(args: tuple[Any, ...], *given: tuple[Site, int, tuple[Any, ...], Any], most: int | None = None) -> ShortcutFinder:
    """Through sites, each with its segment, what it is handed, and what it returns."""
    finder = ShortcutFinder(args, {}, most)
    for called, segment, handed, returned in given:
        finder.called(SiteCall(called, handed, {}), segment)
        finder.returned(returned)
    return finder


HIDDEN, MASK, NORMED, WIDE = (torch.randn(2) for _ in range(4))
NORM_SITE, LINEAR = site("norm"), site("linear")


def test_steps_lead_no_further_than_they_have_to() -> None:
    finder = followed((HIDDEN, MASK), (NORM_SITE, 1, (HIDDEN,), NORMED), (LINEAR, 3, (NORMED,), (WIDE, None)))
    first, second = ShortcutStep(NORM_SITE, 1, 0), ShortcutStep(LINEAR, 3, 2)
    assert finder.steps({1}) == (first,)
    assert finder.steps({1, 3}) == finder.steps({3}) == (first, second)
    assert finder.steps({2}) == finder.steps({1, 4}) == (), "code was let go there"
    assert finder.steps(()) == ()


def test_two_sites_may_be_handed_the_same() -> None:
    """As latent attention's down-projections are."""
    finder = followed((HIDDEN,), (NORM_SITE, 1, (HIDDEN,), NORMED), (LINEAR, 3, (NORMED,), WIDE), (LINEAR, 5, (NORMED,), WIDE))
    assert [step.source for step in finder.steps({1, 3, 5})] == [0, 1, 1]


@pytest.mark.parametrize("handed", [(NORMED.clone(),), (NORMED, MASK), (None,), ()], ids=["a copy", "more", "nothing", "none"])
def test_no_step_leads_beyond_a_site_that_is_handed_anything_else(handed: tuple[Any, ...]) -> None:
    finder = followed((HIDDEN,), (NORM_SITE, 1, (HIDDEN,), NORMED), (LINEAR, 3, handed, WIDE), (LINEAR, 5, (HIDDEN,), WIDE))
    assert len(finder.steps({1})) == 1
    assert finder.steps({3}) == finder.steps({5}) == ()


def test_a_site_with_a_first_part_takes_two_segments() -> None:
    from megatron_lynx.runtime.site import FirstPart

    first = FirstPart("norm", lambda given: (given,), "a node", lambda node: (0,))
    finder = followed((HIDDEN,), (Site("linear", None, lambda given: given, first), 2, (HIDDEN,), WIDE))
    assert len(finder.steps({1})) == len(finder.steps({1, 2})) == 1
    assert finder.steps({3}) == ()


def test_no_more_is_followed_than_was_asked_for() -> None:
    finder = followed((HIDDEN,), (NORM_SITE, 1, (HIDDEN,), NORMED), (LINEAR, 3, (NORMED,), WIDE), most=1)
    assert len(finder.steps({1})) == 1
    assert finder.steps({3}) == ()
