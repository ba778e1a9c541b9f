"""A half of experts is recorded and recomputed under any load: rows that change from call to call, experts without any.

hidden ─> [norm] ─> [router] ─> [dispatch x 3] ─> ([experts_fc1] ─> gelu ─> [experts_fc2]) x 2 ─> [combine x 3] ─> dropout, +
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout, gelu

from megatron_lynx.anatomy import EXPERTS
from megatron_lynx.nest import all_in
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.frame import Frame, HalfPolicy
from megatron_lynx.runtime.site import Site, SiteCall
from tests.runtime.tiny_half import Linear, reporting_to

NORM, ROUTER, DISPATCH, FC1, ACTIVATION, FC2, COMBINE, RESIDUAL = EXPERTS.names
ROWS, WIDTH = 6, 4
FLOAT_BYTES = 4
LOADS = [(3, 3), (0, 6), (6, 0), (5, 1), (1, 5)]


class TinyExperts(torch.nn.Module):
    """Two experts. `rows`: how many of the first rows go to the first one; the others go to the second."""

    def __init__(self, report: Callable[[SiteCall], Any] = lambda call: call()) -> None:
        super().__init__()
        self.norm, self.gate = torch.nn.LayerNorm(WIDTH), Linear(WIDTH, 1)
        self.first = torch.nn.ModuleList([Linear(WIDTH, 2 * WIDTH) for _ in range(2)])
        self.second = torch.nn.ModuleList([Linear(2 * WIDTH, WIDTH) for _ in range(2)])
        self.bias = torch.nn.Parameter(torch.randn(WIDTH))
        self.report = report
        self.rows: Sequence[int] = ()
        self.ran: Counter[str] = Counter()

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self._site(NORM, self.norm, self.norm, hidden)
        gate = self._site(ROUTER, self.gate, lambda given: torch.sigmoid(self.gate(given)), normed)
        order = torch.arange(ROWS).flip(0)
        tokens, weights = self._site(
            DISPATCH, None, lambda *given: tuple(one[order] for one in given), normed, gate, has_next_method=True
        )
        tokens, weights = self._site(
            DISPATCH, None, lambda *given: tuple(one.clone() for one in given), tokens, weights, has_next_method=True
        )
        tokens, weights, counts = self._site(DISPATCH, None, lambda *given: (*given, torch.tensor(self.rows)), tokens, weights)
        made = []
        for number, (rows, share) in enumerate(zip(tokens.split(counts.tolist()), weights.split(counts.tolist()), strict=True)):
            wide = self._site(FC1, self.first[number], self.first[number], rows)
            narrow = self._site(FC2, self.second[number], self.second[number], gelu(wide) * share)
            narrow += self.bias * share  # in place, as Megatron's experts do
            made.append(narrow)
        back = self._site(COMBINE, None, lambda given: given + 0, torch.cat(made), has_next_method=True)
        back = self._site(COMBINE, None, lambda given: given * 1, back, has_next_method=True)
        back = self._site(COMBINE, None, lambda given: given[order], back)
        return dropout(back, 0.5) + hidden

    def _site(
        self, name: str, module: torch.nn.Module | None, code: Callable[..., Any], *given: Tensor, has_next_method: bool = False
    ) -> Any:
        def run(*given: Tensor) -> Any:
            self.ran[name] += 1
            return code(*given)

        return self.report(SiteCall(Site(name, module, run, has_next_method=has_next_method), given, {}))


class Run:
    """One half under an engine, or by itself. Each call draws the same numbers."""

    def __init__(self, engine: Engine | None, recompute: frozenset[str] = frozenset()) -> None:
        torch.manual_seed(1)
        self.engine = engine
        self.half = TinyExperts() if engine is None else TinyExperts(reporting_to(engine))
        self._policy = HalfPolicy(layer=1, section=EXPERTS, recompute=recompute)

    def __call__(self, rows: Sequence[int]) -> list[Tensor]:
        """What a call returns, and all its gradients."""
        output = self.forward(rows)
        output.sum().backward()
        given = (self.hidden, *self.half.parameters())
        found = [output.detach(), *(one.grad.clone() for one in given if one.grad is not None)]
        self.half.zero_grad()
        return found

    def forward(self, rows: Sequence[int]) -> Tensor:
        """The call alone."""
        torch.manual_seed(rows[0])
        self.half.rows = rows
        self.half.ran.clear()
        self.hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
        if self.engine is None:
            return self.half(self.hidden)  # type: ignore[no-any-return]
        return self.engine.half(self._policy, self.half.forward, (self.hidden,), {})  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "recompute",
    [{NORM}, {ACTIVATION}, {FC1}, {RESIDUAL}, {NORM, FC1, ACTIVATION}, {*EXPERTS.recomputable}],
    ids=lambda recompute: "+".join(sorted(recompute)),
)
@pytest.mark.parametrize("loads", [LOADS, LOADS[1:] + LOADS[:1]], ids=["even first", "an expert without rows first"])
def test_any_load_equals_stock(recompute: set[str], loads: list[tuple[int, int]]) -> None:
    """And each call lets something go, though the first one taught what, with other rows."""
    engine = Engine()
    ours, stock = Run(engine, frozenset(recompute)), Run(None)
    for rows in loads:
        assert all(torch.equal(one, other) for one, other in zip(ours(rows), stock(rows), strict=True)), rows
        assert engine.take_counts().let_go_bytes > 0, rows


def test_what_is_let_go_does_not_depend_on_the_first_load() -> None:
    """An expert without rows has empty tensors, which have no address by which they could be told apart."""
    found = []
    for first in LOADS:
        engine = Engine()
        run = Run(engine, frozenset({NORM, FC1, ACTIVATION}))
        run(first)
        engine.take_counts()
        run((2, 4))
        found.append(engine.take_counts().let_go_bytes)
    assert len(set(found)) == 1
    # behind the norm: its input is the half's own; router reads the norm's output. Behind the experts: GELU's input, its output
    # and the weights (both factors), and the product that the second linear reads
    assert found[0] >= ROWS * (WIDTH + 3 * 2 * WIDTH) * FLOAT_BYTES


@pytest.mark.parametrize(
    ("recompute", "held"),
    [
        ({ACTIVATION}, ROWS * (2 * WIDTH + 1 + 2 * WIDTH)),
        ({FC1, ACTIVATION}, ROWS * (2 * WIDTH + 1)),
        ({NORM, FC1, ACTIVATION}, ROWS * (WIDTH + 1)),
        ({NORM}, 0),
        ({RESIDUAL}, 0),
    ],
    ids=["activation", "first linears", "norm and first linears", "norm", "residual"],
)
def test_memos_hold_what_experts_get_and_no_more(recompute: set[str], held: int) -> None:
    """In each call: the dispatched rows and their weights, and what norm and first linears returned that are kept; the graph
    holds that as well. What a recomputation only passes has no values; what second linears returned once had some in later
    calls."""
    run = Run(Engine(), frozenset(recompute))
    for rows in LOADS:
        gc.collect()  # what other tests left in cycles
        output = run.forward(rows)
        [frame] = [thing for thing in gc.get_objects() if type(thing) is Frame]
        memos = [tensor for memo in frame.memos.values() for tensor in all_in(Tensor, memo.outputs)]
        assert sum(tensor.numel() for tensor in memos if tensor.is_floating_point()) == held
        output.sum().backward()
        del output, frame, memos


def test_router_and_exchanges_run_once() -> None:
    run = Run(Engine(), frozenset(EXPERTS.recomputable))
    run((3, 3))
    run((0, 6))
    assert run.half.ran == {NORM: 2, ROUTER: 1, DISPATCH: 3, FC1: 4, FC2: 2, COMBINE: 3}
