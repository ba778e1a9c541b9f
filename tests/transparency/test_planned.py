"""What the planner writes for chunks, for the host and for moved layers is what the runtime does, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_lynx.config.job import Budget
from megatron_lynx.errors import Infeasible
from megatron_lynx.plan.plan import Plan, Whole
from megatron_lynx.planner import Decision, decide, make_plan
from megatron_lynx.profiler.profile import BlockProfile, LinkPoint
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.units import MIB
from tests.long import long
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job
from tests.transparency.test_every_bit import checked
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

Pools = Callable[[int], RankPool]


def decided(offload_ratio: float = 0.0, policy: str = "planned", **layout: Any) -> Decision:
    """On a machine whose head takes as long as a layer."""
    job = tiny_job("llama", pipeline=2, microbatches=4, **layout)
    job = job.model_copy(update={"offload_ratio": offload_ratio, "policy": policy})
    profile = made_up_profile(job)
    layer_s = profile.attention.forward_s + profile.mlp.forward_s
    return decide(job, profile.model_copy(update={"head": BlockProfile(forward_s=layer_s, backward_s=2 * layer_s)}))


@pytest.mark.parametrize("policy", ["planned", *long("none"), "balanced"])
def test_chunks_that_offload(pool_of: Pools, policy: str) -> None:
    decision = decided(offload_ratio=0.63, policy=policy, layers_per_chunk=1)
    assert all(entry.offload is not None for entry in decision.plan.chunks_of(0))
    assert all(entry.offload is None for entry in decision.plan.chunks_of(1)), "three chunks in flight"
    for rank, (outcome,) in enumerate(checked(pool_of, decision.job, [decision.plan])):
        last = outcome.planned.counts[-1]
        assert (last.offloaded_bytes > 0) == (rank == 0)
        expected = decision.plan.stages[rank].predicted.host_bytes
        assert last.host_bytes == pytest.approx(expected, rel=0.05), "tensors are rounded up, and the smallest stay"


def test_one_stage_that_offloads_within_a_micro_batch(pool_of: Pools) -> None:
    """The planner's own choice for less memory than keeping takes: recomputations, and what leaves behind its half."""
    job = tiny_job("llama", layers=4, microbatches=2)
    profile = made_up_profile(job)
    profile = profile.model_copy(update={"links": (*profile.links, LinkPoint(kind="host", bytes=1, seconds=1e-9))})
    kept_bytes = rehearse(uniform_plan(job, "none"), profile).memory(0).peak_bytes
    tight = job.model_copy(update={"budget": Budget(activation_mib=0.6 * kept_bytes / MIB), "offload_ratio": "auto"})
    plan = decide(tight, profile).plan
    (stage,) = plan.stages
    assert stage.offload is not None
    assert stage.offload.pace_bytes is not None
    ((outcome,),) = checked(pool_of, job, [plan])
    last = outcome.planned.counts[-1]
    assert last.offloaded_bytes == last.reloaded_bytes == job.microbatches * stage.offload.bytes
    assert last.host_bytes == pytest.approx(stage.predicted.host_bytes, rel=0.05)


def test_a_job_may_ask_for_whole_micro_batches(pool_of: Pools) -> None:
    """Every second micro-batch of the first stage keeps everything, and only the others recompute. The last stage has one in
    flight, so it keeps that. One more does not fit."""
    job = tiny_job("llama", layers=4, pipeline=2, microbatches=4)
    profile = made_up_profile(job)
    kept, recomputed = (rehearse(uniform_plan(job, how), profile).memory(0).peak_bytes for how in ("none", "all"))
    budget = Budget(activation_mib=(0.8 * kept + 0.2 * recomputed) / MIB)
    asked = [job.model_copy(update={"budget": budget, "whole_microbatches": whole}) for whole in (1, "auto", 2)]
    one, most = (make_plan(each, profile) for each in asked[:2])
    assert [entry.whole for entry in one.stages] == [Whole(of_every=2, first=1), None]
    assert most.stages == one.stages
    with pytest.raises(Infeasible, match="at most 1 of 2 in flight"):
        make_plan(asked[2], profile)
    trial = Trial(steps=1, traced=True, canaries=True)
    first, last = (outcome for (outcome,) in checked(pool_of, job, [one], trial))
    recomputing = [{e["micro_batch"] for e in each.planned.events if e["kind"] == "recompute"} for each in (first, last)]
    assert recomputing == [{1, 3}, set()]


def test_layers_that_were_moved(pool_of: Pools) -> None:
    decision = decided(layers=7, partition="auto")
    assert decision.job.partition == (4, 3)
    checked(pool_of, decision.job, [decision.plan])


LAYOUTS: dict[str, dict[str, Any]] = {
    "PP2xVPP2": {"pipeline": 2, "layers_per_chunk": 1, "microbatches": 4},
    "TP2xPP2xVPP2, groups of 3 and 2": {
        "tensor": 2,
        "pipeline": 2,
        "layers_per_chunk": 1,
        "microbatches": 5,
        "microbatch_group": 3,
    },
    "TP2xPP2xVPP2+SP": {"tensor": 2, "pipeline": 2, "layers_per_chunk": 1, "microbatches": 4, "sequence_parallel": True},
}


@pytest.mark.parametrize(
    "layout", [name if "groups" not in name else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_interleaved_plans_hide_what_they_say(pool_of: Pools, layout: str) -> None:
    """With dropout. The solver's plan under a budget, the usual windows, and some micro-batches whole: the same bits as stock,
    with NaN in what was let go, and every recomputation where and when the simulated step has it."""
    job = tiny_job("gpt", **LAYOUTS[layout])
    profile = made_up_profile(job, link_s=10.0)
    usual = uniform_plan(job)
    budget = Budget(activation_mib=1.02 * max(rehearse(usual, profile).memory(stage).peak_bytes for stage in range(2)) / MIB)
    planned = make_plan(job.model_copy(update={"budget": budget}), profile)
    some_whole = usual.model_dump(mode="json")
    for entry in some_whole["stages"]:
        entry["whole"] = {"of_every": 2, "first": 1}
    plans = [planned, usual, Plan.model_validate(some_whole)]
    for rank, outcomes in enumerate(checked(pool_of, job, plans, Trial(steps=1, traced=True, canaries=True))):
        for plan, outcome in zip(plans, outcomes, strict=True):
            stage, simulation = rank // job.parallel.tensor, rehearse(plan, profile)
            assert outcome.planned.overwritten > 0
            seen = [event for event in outcome.planned.events if event["kind"] == "recompute"]
            assert [(e["micro_batch"], e["layer"], e["half"], e["window"]) for e in seen] == list(_simulated(simulation, stage))


def _simulated(simulation: Simulation, stage: int) -> Iterator[tuple[int, int, str, str]]:
    """Every recomputation of a step. Those in a forward are of the backward behind it."""
    executed = simulation.executed[stage]
    for each, behind in zip(executed, [*executed[1:], *executed[-1:]], strict=True):
        owner = behind.action if each.action.kind == "F" else each.action
        for span in each.content.spans:
            if span.kind == "recompute":
                yield owner.micro_batch, span.layer, span.half, span.window  # type: ignore[misc]
