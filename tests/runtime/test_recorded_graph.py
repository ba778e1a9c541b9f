"""Later calls of a half follow the graph that its first one recorded; one that is out of date costs memory, never a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.site import FirstCall, RecordedGraph, SiteCall, recorded_graphs
from tests.runtime.tiny_half import ACTIVATION, FC1, FC2, NORM, RESIDUAL, WIDTH, Linear, TinyHalf, policy, reporting_to

RECOMPUTED = frozenset([NORM, FC1, ACTIVATION, RESIDUAL])


class Run:
    """One half under an engine, or by itself. Each call draws the same numbers."""

    def __init__(self, engine: Engine | None, recompute: frozenset[str] = RECOMPUTED) -> None:
        torch.manual_seed(1)
        self.engine = engine
        self.half = TinyHalf(reporting_to(engine) if engine is not None else None)
        self._policy = policy(recompute)

    def __call__(self, rows: int = 3, dtype: torch.dtype | None = None) -> list[Tensor]:
        """What a call returns, and all its gradients."""
        torch.manual_seed(rows)
        hidden = torch.randn(rows, WIDTH, requires_grad=True)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            output = self._forward(hidden)
        output.float().sum().backward()
        found = [output.detach(), hidden.grad.clone(), *(gradient.clone() for gradient in self.half.gradients())]  # type: ignore
        self.half.forget()
        return found

    def _forward(self, hidden: Tensor) -> Tensor:
        if self.engine is None:
            return self.half(hidden)  # type: ignore[no-any-return]
        return self.engine.half(self._policy, self.half.forward, (hidden,), {})  # type: ignore[no-any-return]


@pytest.fixture
def read_sites(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sites whose graphs were read, in order."""
    names: list[str] = []
    read = FirstCall.read

    def reading(self: FirstCall, call: SiteCall, *others: Any) -> None:
        names.append(call.site.name)
        read(self, call, *others)

    monkeypatch.setattr(FirstCall, "read", reading)
    return names


def alike(ours: Run, stock: Run, *calls: dict[str, Any]) -> None:
    for call in calls:
        assert all(torch.equal(one, other) for one, other in zip(ours(**call), stock(**call), strict=True)), call


SITES = [NORM, FC1, FC2]


def test_only_the_first_call_records_a_graph(read_sites: list[str]) -> None:
    alike(Run(Engine()), Run(None), {}, {}, {})
    assert read_sites == SITES


def test_later_calls_let_go_what_the_first_one_did(read_sites: list[str]) -> None:
    engine = Engine()
    run, bytes_ = Run(engine), []
    for _ in range(3):
        run()
        bytes_.append(engine.take_counts().let_go_bytes)
    assert bytes_[0] == bytes_[1] == bytes_[2] > 0


def test_another_length_has_a_graph_of_its_own(read_sites: list[str]) -> None:
    alike(Run(Engine()), Run(None), {}, {"rows": 5}, {}, {"rows": 5})
    assert read_sites == 2 * SITES


def test_one_length_too_many_forgets_the_one_used_longest_ago() -> None:
    """All were forgotten at once: a run whose lengths fall into one bucket more than that recorded each anew, again and again."""
    graphs = recorded_graphs(4)
    for length in (*range(4), 0, 1, 4):  # 0 and 1 are used again
        graphs("a half", (length,))[RECOMPUTED] = RecordedGraph()
    assert [length for length in (0, 1, 3, 4, 2) if graphs("a half", (length,))] == [0, 1, 3, 4]


def test_an_evaluation_in_between_changes_nothing(read_sites: list[str]) -> None:
    ours, stock = Run(Engine()), Run(None)
    alike(ours, stock, {})
    with torch.no_grad():
        ours._forward(torch.randn(7, WIDTH))
    alike(ours, stock, {})
    assert read_sites == SITES


def test_autocast_that_is_switched_on_and_off_again(read_sites: list[str]) -> None:
    """The nodes of its linears are others then, and what they save is cast."""
    ours, stock = Run(Engine()), Run(None)
    for run in (ours, stock):
        torch.manual_seed(9)
        run.half.fc1, run.half.fc2 = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)  # type: ignore[assignment]
    alike(ours, stock, {}, *3 * [{"dtype": torch.bfloat16}], {}, {})


def cast(half: TinyHalf) -> None:
    """linear_fc1 runs through other operations than before."""
    usual = half.fc1.forward
    half.fc1.forward = lambda given: usual(given * 1.0) * 2.0  # type: ignore[method-assign]


def swap(half: TinyHalf) -> None:
    torch.manual_seed(9)
    half.fc1 = Linear(WIDTH, 2 * WIDTH)


def plain(half: TinyHalf) -> None:
    torch.manual_seed(9)
    half.fc1 = torch.nn.Linear(WIDTH, 2 * WIDTH)  # type: ignore[assignment]


def drop(half: TinyHalf) -> None:
    """The kept site drops out, and draws numbers, from now on."""
    half.kept_dropout = 0.5


def another_norm(half: TinyHalf) -> None:
    half.norm = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Tanh())  # type: ignore[assignment]


def _together(items: frozenset[str]) -> str:
    return "+".join(sorted(items))


@pytest.mark.parametrize("change", [cast, swap, plain, drop, another_norm])
@pytest.mark.parametrize(
    "recompute", [RECOMPUTED, frozenset([NORM]), frozenset([ACTIVATION]), frozenset([RESIDUAL])], ids=_together
)
def test_a_half_that_becomes_another_one(change: Callable[[TinyHalf], None], recompute: frozenset[str]) -> None:
    """Between two calls. The call that notices keeps more; the one behind it records anew."""
    engine = Engine()
    ours, stock = Run(engine, recompute), Run(None, recompute)
    alike(ours, stock, {}, {})
    for run in (ours, stock):
        change(run.half)
    alike(ours, stock, {}, {}, {})
    engine.take_counts()
    ours()
    again = engine.take_counts().let_go_bytes
    fresh = Run(Engine(), recompute)
    change(fresh.half)
    fresh()
    assert fresh.engine is not None
    assert again == fresh.engine.take_counts().let_go_bytes, "what a half lets go that was so from the beginning"


def test_a_first_call_that_fails_records_nothing(read_sites: list[str]) -> None:
    engine = Engine()
    ours, stock = Run(engine), Run(None)
    usual = ours.half.fc2.forward

    def breaking(given: Tensor) -> Tensor:
        raise ValueError("a fault in the middle")

    ours.half.fc2.forward = breaking  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="in the middle"):
        ours()
    ours.half.fc2.forward = usual  # type: ignore[method-assign]
    read_sites.clear()
    alike(ours, stock, {}, {})
    assert read_sites == SITES
