"""Delayed weight gradients in pieces: every bit stays stock's, each piece has a wait of its own, and what differs stays whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx.anatomy import EXPERTS, LINEARS
from megatron_lynx.anatomy.address import RECV_BACKWARD, is_forward
from megatron_lynx.apply.hooks.weight_gradients import LinearOf, cut, proven, refused_pieces
from megatron_lynx.config.job import Budget
from megatron_lynx.cost import section
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.rule import Rule
from megatron_lynx.planner import decide
from megatron_lynx.testbed.ranks import RankPool
from tests.deferring import deferring
from tests.long import with_models
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job
from tests.transparency.queued import held_bytes
from tests.transparency.test_deferring_experts import into_exchanges, plans, trial_of
from tests.transparency.test_every_bit import LAYOUTS, checked
from tests.transparency.test_experts import STATEFUL, job_of
from tests.transparency.test_weight_gradients import FUSED, counts_of, everything, nothing, per_step
from tests.transparency.trials import Trial

Pools = Callable[[int], RankPool]
DDP = Trial(steps=2, training={"ddp": True}, model=FUSED)


def in_pieces(plan: Plan, pieces: Mapping[str, int]) -> Plan:
    """The plan with these linears cut. Each piece has a wait: if fewer are named, they are named again."""

    def cut(rule: Rule) -> Rule:
        numbers = {linear: number for linear, number in pieces.items() if linear in rule.weight_gradients}
        waits = {
            linear: (some * numbers.get(linear, 1))[: max(len(some), numbers.get(linear, 1))]
            for linear, some in rule.weight_gradients.items()
        }
        return rule.model_copy(update={"weight_gradients": waits, "weight_gradient_pieces": numbers})

    stages = (stage.model_copy(update={"rules": tuple(map(cut, stage.rules))}) for stage in plan.stages)
    return plan.with_stages(stages)


ALL = dict.fromkeys(LINEARS, 4) | {LINEARS[0]: 2}


@with_models(["TP2", "TP2+SP", "TP2xPP2xVPP2+SP"], ("TP2", "TP2xPP2xVPP2+SP"))
def test_into_waits(pool_of: Pools, layout: str, like: Any) -> None:
    """Kept and recomputed, into forwards alone, into everything, and with few bytes."""
    job = tiny_job(like, **LAYOUTS[layout])
    plans = [
        in_pieces(deferring(nothing(job), chosen=is_forward), ALL),
        in_pieces(deferring(everything(job)), ALL),
        in_pieces(deferring(everything(job), chosen=is_forward, most_bytes=20_000), ALL),
    ]
    for rank, (later, at_once, bounded) in enumerate(counts_of(pool_of, job, plans, DDP)):
        pieces = per_step(job, rank) * sum(ALL.values()) // len(ALL)
        assert later.deferred == at_once.deferred == bounded.deferred == pieces
        assert at_once.filled > later.filled > bounded.filled > 0
        assert later.deferred_bytes > 20_000 * job.chunks >= bounded.deferred_bytes > 0


def test_a_wait_runs_one_piece(pool_of: Pools) -> None:
    """The first wait one of four, the second three that it is named for; the stage's second chunk in receives."""
    job = tiny_job("gpt", **LAYOUTS["TP2"])
    waits = ("bwd.mlp.0", *["bwd.attention.0"] * 3)
    plan = deferring(nothing(job), linears=["linear_fc2"], chosen=lambda wait: wait in waits)
    cut = {"weight_gradients": {"linear_fc2": waits}, "weight_gradient_pieces": {"linear_fc2": 4}}
    plan = plan.with_stages(
        stage.model_copy(update={"rules": tuple(rule.model_copy(update=cut) for rule in stage.rules)}) for stage in plan.stages
    )
    [(outcome, *_), *_] = checked(pool_of, job, [plan], Trial(training={"ddp": True}, model=FUSED, traced=True))
    ran = Counter(event["window"] for event in outcome.planned.events if event["kind"] == "weight_gradient")
    layers, microbatches = job.model.layers, job.microbatches
    assert ran == {f"{wait}@{layer}": waits.count(wait) * microbatches for wait in set(waits) for layer in range(1, layers + 1)}


def test_in_receives(pool_of: Pools) -> None:
    job = tiny_job("gpt", **LAYOUTS["PP2"])
    plan = in_pieces(deferring(nothing(job), chosen=lambda wait: wait == RECV_BACKWARD), ALL)
    first, last = ([counts] for [counts] in counts_of(pool_of, job, [plan], DDP))
    assert first[0].filled > 0
    assert last[0].deferred == 0


def test_operands_are_held_until_the_last_piece_and_no_longer(pool_of: Pools) -> None:
    job = tiny_job("llama", **LAYOUTS["TP2+SP"])
    plan = in_pieces(deferring(nothing(job)), ALL)
    for held in pool_of(2).run(held_bytes, job, plan):
        assert held.counted == held.alive
        assert max(held.counted) == held.most > 0


def test_experts_in_groups(pool_of: Pools) -> None:
    """Of experts that run one by one each wait takes a group; their GEMMs are as before."""
    job = job_of("EP2", layers=2)
    plan = deferring(plans(job)[0], EXPERTS.linears, into_exchanges)
    candidates = [plan, in_pieces(plan, dict.fromkeys(EXPERTS.linears, 2))]
    for whole, pieces in counts_of(pool_of, job, candidates, trial_of(**STATEFUL)):
        assert pieces.deferred == whole.deferred
        assert 0 < pieces.filled <= whole.filled


def test_shapes_that_differ_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that sums the tokens in two halves where there are few rows."""

    def gemm(given: Tensor, gradient: Tensor, out: Tensor) -> None:
        halves = given.chunk(2), gradient.chunk(2)
        for part, of in zip(*halves, strict=True) if len(out) < 16 else [(given, gradient)]:
            out.add_(of.t() @ part)

    module = torch.nn.Linear(8, 32)
    module.weight.main_grad = torch.zeros(32, 8)  # type: ignore[assignment]
    linears = (LinearOf(layer, "linear_fc1", "column_parallel", pieces=pieces) for layer, pieces in enumerate((1, 2, 4, 4)))
    equal = proven(64, dict.fromkeys(linears, module), lambda dtype: gemm)
    said = "weight gradients stay whole, because their pieces differ in bits on this device: 32 x 8 in 4"
    assert caplog.messages == [said]
    operands, out = (torch.randn(64, 8), torch.randn(64, 32)), torch.zeros(32, 8)
    assert cut(gemm, operands, out, 4, equal) is None
    assert cut(gemm, (operands[0][:32], operands[1][:32]), out, 2, equal) is None, "nobody has compared so few tokens"
    pieces = cut(gemm, operands, out, 2, equal)
    assert pieces is not None
    for compute in pieces.values():
        compute()
    whole = torch.zeros(32, 8)
    gemm(*operands, whole)
    assert torch.equal(out, whole)


@pytest.mark.parametrize(
    ("module", "experts", "how", "said"),
    [
        (object(), 0, {"fp8": True}, "operands in 16 or 32 bits: FP8 scales are of whole operands"),
        (object(), 2, {"fp8": True}, "at most 2, a rank's experts"),
        (type("Linear", (), {"apply_bias": True, "gemm_bias_unfused_add": False}), 0, {"fp8": False}, "the bias gradient, too"),
    ],
)
def test_refusals(module: Any, experts: int, how: Any, said: str) -> None:
    (problem,) = refused_pieces("layer 1.linear_fc1", module, experts, 4, **how)
    assert problem.where == "plan: weight_gradient_pieces of layer 1.linear_fc1"
    assert said in problem.needed
    assert list(refused_pieces("layer 1.linear_fc1", module, experts, 1, **how)) == []


def test_one_kernel_for_all_experts_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
    (problem,) = refused_pieces("layer 1.experts_fc1", object(), 4, 2, fp8=False)
    assert "NVTE_USE_CUTLASS_GROUPED_GEMM unset" in problem.needed


@pytest.mark.parametrize("layout", ["TP2", "TP2+SP", "TP2xPP2"])
def test_a_planned_plan(pool_of: Pools, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are two thirds of the longest weight gradient. Copies of so few columns would cost more than their GEMMs."""
    monkeypatch.setattr(section, "COPIED_FLOPS", 1)
    layouts: dict[str, Any] = LAYOUTS | {"TP2xPP2": {"tensor": 2, "pipeline": 2}}
    job = tiny_job("llama", **layouts[layout])
    overlap = job.overlap.model_copy(update={"weight_gradients": "deferred", "weight_gradient_pieces": True})
    job = job.model_copy(update={"overlap": overlap, "budget": Budget(memory_gib=10)})
    longest_s = made_up_profile(job).mlp.items["linear_fc1"].wgrad_s
    plan = decide(job, made_up_profile(job, longest_s / 1.5)).plan
    pieces = [rule.weight_gradient_pieces for stage in plan.stages for rule in stage.rules]
    assert any(pieces)
    for (counts,) in counts_of(pool_of, job, [plan], DDP):
        assert counts.filled > 0
