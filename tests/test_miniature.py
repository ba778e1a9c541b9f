"""docs/miniature.py is what docs/architecture.md opens with: it shows the mechanism only as long as it is right."""

from __future__ import annotations

import runpy
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_lynx.testbed.ranks import RankPool

FILE = Path(__file__).parents[1] / "docs" / "miniature.py"
WAYS = {
    "kept": {"drop": False, "window": False},
    "on demand": {"drop": True, "window": False},
    "in the wait": {"drop": True, "window": True},
}


def storages(*tensors: torch.Tensor) -> frozenset[int]:
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def gradients_and_logs(rank: int) -> dict[str, tuple[list[torch.Tensor], list[str]]]:
    """Of each way to run the step, its loss and gradients, and what happened in which order."""
    step = runpy.run_path(str(FILE))["step"]
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(rank)  # each rank's share of the gradient differs
    linears, x = (nn.Linear(8, 32), nn.Linear(32, 8)), torch.randn(4, 8)
    found = {}
    for way, how in WAYS.items():
        log: list[str] = []
        for linear in linears:
            linear.zero_grad()
        loss = step(*linears, x, **how, log=log)
        gradients = [
            parameter.grad.clone() for linear in linears for parameter in linear.parameters() if parameter.grad is not None
        ]
        found[way] = ([loss, *gradients], log)
    return found


def test_gradients_are_equal_and_the_recomputation_is_in_the_wait(pool_of: Callable[[int], RankPool]) -> None:
    for found in pool_of(2).run(gradients_and_logs):
        reference, log = found["kept"]
        assert log == ["issued", "waited for"]
        for way in ("on demand", "in the wait"):
            assert len(found[way][0]) == 5
            assert all(map(torch.equal, reference, found[way][0])), way
        assert found["on demand"][1] == ["dropped", "issued", "waited for", "recomputed on demand", "handed over"]
        assert found["in the wait"][1] == ["dropped", "issued", "recomputed in the wait", "waited for", "handed over"]


@pytest.mark.parametrize("drop", [True, False])
def test_what_was_dropped_is_gone_until_it_is_computed_again_and_forgotten_behind_backward(drop: bool) -> None:
    lower, x, made = nn.Linear(8, 32), torch.randn(4, 8), []

    def code(given: torch.Tensor) -> torch.Tensor:
        made.append(lower(given))
        return nn.functional.gelu(made[-1])

    frame = runpy.run_path(str(FILE))["Frame"](code, x, storages(x, *lower.parameters()), [])
    out = frame.record() if drop else code(x)
    expected, there = made[0].detach().clone(), weakref.ref(made[0])
    made.clear()
    assert (there() is None) == drop
    frame.recompute("here")
    made.clear()
    assert [torch.equal(tensor, expected) for tensor in frame.regenerated.values()] == [True] * drop
    out.sum().backward()
    assert frame.regenerated == {}
