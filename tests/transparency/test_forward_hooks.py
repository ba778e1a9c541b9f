"""Users' forward hooks, and Megatron's recorders, which are such hooks, see each forward once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lynx.errors import RecomputeError
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from tests.tiny_jobs import tiny_job

from ..te_releases import folder_of, python_path
from . import listening
from .plans import plan_for, recomputable

Pools = Callable[[int], RankPool]

EXPERTS = {"count": 4, "per_token": 2, "ffn": 32, "layers": ("2-4",)}
DENSE_JOB, EXPERT_JOB = tiny_job(), tiny_job("llama", experts=EXPERTS)


def all_recomputed(job) -> Plan:  # type: ignore[no-untyped-def]
    return plan_for(job, lambda layer: recomputable(job))


@pytest.mark.parametrize("job", [DENSE_JOB, EXPERT_JOB], ids=["dense", "experts"])
def test_hooks_heard_each_recomputation_as_one_more_forward(pool_of: Pools, job) -> None:  # type: ignore[no-untyped-def]
    """With memory that nobody had written, where a recomputation passes what it does not need: so recorded those who record
    activations or count tokens. Every hook hears what stock's hears: the same modules, in the same order, with the same bits."""
    partly = plan_for(job, lambda layer: ("rotary", "core_attention", "activation", "experts_activation"))
    [calls] = pool_of(1).run(listening.heard, job, [None, all_recomputed(job), partly])
    stock, *planned = calls
    assert len(stock) > 100
    assert [each == stock for each in planned] == [True, True]


@pytest.mark.parametrize(
    ("place", "kind", "hook", "half"),
    [
        ("mlp", "forward_hook", listening.more_in_place, "mlp(2)"),
        ("mlp.linear_fc1", "forward_hook", listening.more, "mlp(2)"),
        ("self_attention.linear_qkv", "forward_pre_hook", listening.other_inputs, "attention(2)"),
    ],
    ids=["in place", "another output", "another input"],
)
def test_a_hook_that_changes_what_is_computed_is_refused(pool_of: Pools, place: str, kind: str, hook, half: str) -> None:  # type: ignore[no-untyped-def]
    """By name: a recomputation calls no hooks, and would make tensors of another forward."""
    plan = all_recomputed(DENSE_JOB)
    [(error, changed)] = pool_of(1).run(listening.step_with, DENSE_JOB, plan, place, kind, hook)
    assert isinstance(error, RecomputeError)
    assert error.problems[0].where.startswith(f"forward of {half}: {hook.__name__}, a hook of ")
    assert changed == []


def test_where_nothing_is_recomputed_a_hook_may_change_what_it_likes(pool_of: Pools) -> None:
    plan = plan_for(DENSE_JOB, lambda layer: ("core_attention",))
    found = pool_of(1).run(listening.step_with, DENSE_JOB, plan, "mlp.linear_fc1", "forward_hook", listening.more)
    assert found == [(None, [])]


def test_a_hook_that_raises_ends_the_step_with_its_own_error(pool_of: Pools) -> None:
    """And leaves nothing installed, on the model or on itself."""
    plan = all_recomputed(DENSE_JOB)
    [(error, changed)] = pool_of(1).run(listening.step_with, DENSE_JOB, plan, "mlp.linear_fc1", "forward_hook", listening.fails)
    assert (type(error), error.args, changed) == (KeyError, ("a hook of a user's",), [])


def test_a_hook_that_removes_itself_is_gone(pool_of: Pools) -> None:
    assert pool_of(1).run(listening.once, DENSE_JOB, all_recomputed(DENSE_JOB)) == [1]


def test_megatrons_trace_of_routers_has_a_record_for_each_forward(tmp_path: Path) -> None:
    """--moe-routing-trace-path, since 0.19."""
    path = python_path(folder_of("MEGATRON_CORE", "0.19", "megatron/core"))
    with RankPool(1, env={"PYTHONPATH": path}) as pool:
        [(stock, planned)] = pool.run(listening.traced_routes, EXPERT_JOB, [None, all_recomputed(EXPERT_JOB)], tmp_path)
    assert stock == planned == EXPERT_JOB.microbatches * len(EXPERT_JOB.model.expert_layers)
