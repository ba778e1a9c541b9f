"""A model that changes while a plan is in force: recipes go out of date, and every bit stays stock's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_lynx.testbed.ranks import RankPool
from tests.tiny_jobs import tiny_job
from tests.transparency.changing import CHANGES, steps
from tests.uniform import uniform_plan

JOB = tiny_job("gpt", layers=2)
PLANS = {
    "everything": None,
    "norms and the core": ("input_layernorm", "core_attention"),
    "additions": ("attention_bda", "mlp_bda"),
}


@pytest.mark.parametrize("recompute", PLANS.values(), ids=PLANS.keys())
def test_steps_around_each_change(pool_of: Callable[[int], RankPool], recompute: tuple[str, ...] | None) -> None:
    plan = uniform_plan(JOB, windows=False) if recompute is None else uniform_plan(JOB, recompute, windows=False)
    ((stock,), (ours,)) = (pool_of(1).run(steps, JOB, plan) for plan in (None, plan))
    names = ["from the beginning", *(change.__name__ for change in CHANGES)]
    for number, (one, other) in enumerate(zip(stock, ours, strict=True)):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items()), (names[number // 2], number % 2)
    losses = [step["loss 0"].item() for step in stock]
    assert len(set(losses)) == 5, "two of the six changes undo, or leave, what was before"
