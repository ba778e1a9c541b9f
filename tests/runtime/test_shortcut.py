"""A replay that needs only a half's first sites runs them without the half's code, and every bit stays stock's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.shortcut import Course, Step
from megatron_lynx.runtime.site_call import Site, SiteCall
from tests.runtime.tiny_half import ACTIVATION, FC1, NORM, RESIDUAL, WIDTH, TinyHalf, policy, reporting_to


class Run:
    """One half under a plan, or by itself, and how often its code ran."""

    def __init__(self, replay: frozenset[str] | None) -> None:
        torch.manual_seed(1)
        engine = None if replay is None else Engine()
        self.half = TinyHalf(None if engine is None else reporting_to(engine))
        self.calls = 0

        def code(hidden: Tensor) -> Tensor:
            self.calls += 1
            return self.half(hidden)  # type: ignore[no-any-return]

        self._half = code if engine is None else lambda hidden: engine.half(policy(replay or ()), code, (hidden,), {})

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


def calls_of_code(replay: frozenset[str], change: Callable[[TinyHalf], None] = lambda half: None) -> list[int]:
    """How often the half's code ran in each of three steps, with replays; the model changes behind the first."""
    ours, stock, found = Run(replay), Run(None), []
    for step in range(3):
        before = ours.calls
        assert all(torch.equal(one, other) for one, other in zip(ours(), stock(), strict=True)), step
        found.append(ours.calls - before)
        if step == 0:
            change(ours.half)
            change(stock.half)
    return found


@pytest.mark.parametrize("replay", [frozenset({NORM}), frozenset({NORM, FC1})], ids=["norm", "norm+fc1"])
def test_the_first_sites_run_without_the_halfs_code(replay: frozenset[str]) -> None:
    """Of linear_fc1, which is kept, its input is let go: it is what the norm returned."""
    assert calls_of_code(replay) == [1, 1, 1]


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


def followed(args: tuple[Any, ...], *given: tuple[Site, int, tuple[Any, ...], Any], most: int | None = None) -> Course:
    """Through sites, each with its segment, what it is handed, and what it returns."""
    course = Course(args, {}, most)
    for called, segment, handed, returned in given:
        course.called(SiteCall(called, handed, {}), segment)
        course.returned(returned)
    return course


HIDDEN, MASK, NORMED, WIDE = (torch.randn(2) for _ in range(4))
NORM_SITE, LINEAR = site("norm"), site("linear")


def test_steps_lead_no_further_than_they_have_to() -> None:
    course = followed((HIDDEN, MASK), (NORM_SITE, 1, (HIDDEN,), NORMED), (LINEAR, 3, (NORMED,), (WIDE, None)))
    first, second = Step(NORM_SITE, 1, 0), Step(LINEAR, 3, 2)
    assert course.steps({1}) == (first,)
    assert course.steps({1, 3}) == course.steps({3}) == (first, second)
    assert course.steps({2}) == course.steps({1, 4}) == (), "code was let go there"
    assert course.steps(()) == ()


def test_two_sites_may_be_handed_the_same() -> None:
    """As latent attention's down-projections are."""
    course = followed((HIDDEN,), (NORM_SITE, 1, (HIDDEN,), NORMED), (LINEAR, 3, (NORMED,), WIDE), (LINEAR, 5, (NORMED,), WIDE))
    assert [step.source for step in course.steps({1, 3, 5})] == [0, 1, 1]


@pytest.mark.parametrize("handed", [(NORMED.clone(),), (NORMED, MASK), (None,), ()], ids=["a copy", "more", "nothing", "none"])
def test_no_step_leads_beyond_a_site_that_is_handed_anything_else(handed: tuple[Any, ...]) -> None:
    course = followed((HIDDEN,), (NORM_SITE, 1, (HIDDEN,), NORMED), (LINEAR, 3, handed, WIDE), (LINEAR, 5, (HIDDEN,), WIDE))
    assert len(course.steps({1})) == 1
    assert course.steps({3}) == course.steps({5}) == ()


def test_a_site_with_a_first_part_takes_two_segments() -> None:
    from megatron_lynx.runtime.site_call import FirstPart

    first = FirstPart("norm", lambda given: (given,), "a node", lambda node: (0,))
    course = followed((HIDDEN,), (Site("linear", None, lambda given: given, first), 2, (HIDDEN,), WIDE))
    assert len(course.steps({1})) == len(course.steps({1, 2})) == 1
    assert course.steps({3}) == ()


def test_no_more_is_followed_than_was_asked_for() -> None:
    course = followed((HIDDEN,), (NORM_SITE, 1, (HIDDEN,), NORMED), (LINEAR, 3, (NORMED,), WIDE), most=1)
    assert len(course.steps({1})) == 1
    assert course.steps({3}) == ()
