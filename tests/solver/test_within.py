"""How much leaves within a micro-batch: what hides, no more than fits, and only where it is faster."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.config.job import Budget, Job
from megatron_lynx.errors import Infeasible
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import Decision, decide
from megatron_lynx.planner.evaluation import held_by_moment, most_held
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.solver.answer import Share
from megatron_lynx.solver.offload import host_s
from megatron_lynx.solver.stages import Stages
from megatron_lynx.units import MIB
from tests.config.jobs import catalogued_job
from tests.uniform import uniform_plan

pytestmark = pytest.mark.slow

ALONE = {"tensor": 1, "pipeline": 1, "distributed_optimizer": True}
"""No waits: what is recomputed makes a step longer."""
EIGHT = {"tensor": 8, "sequence_parallel": True}
TIGHT = {"tensor": 2, "pipeline": 2}


def job_of(share: float, ratio: Any = "auto", policy: str = "planned", cluster: str = "h800-80g", **layout: Any) -> Job:
    """Llama 7B, whose layers may hold this share of what they would if all were kept."""
    fields = {**ALONE, **layout}
    job = catalogued_job("llama-7b", cluster, gpus=8, batch=64, policy=policy, parallel=fields)
    kept = rehearse(uniform_plan(job, "none"), analytic_profile(job)).memory(fields["pipeline"] - 1).peak_bytes
    changes = {"budget": Budget(activation_mib=share * kept / MIB), "offload_ratio": ratio}
    return job.model_copy(update=changes)


def decided(job: Job) -> Decision:
    return decide(job, analytic_profile(job))


def offloaded_bytes(plan: Plan) -> list[int]:
    return [0 if stage.offload is None else stage.offload.bytes for stage in plan.stages]


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_what_copies_hide_need_not_be_recomputed(share: float) -> None:
    recomputing, offloading = decided(job_of(share, 0.0)), decided(job_of(share))
    (stage,) = offloading.plan.stages
    assert stage.offload is not None
    assert stage.offload.pace_bytes is not None
    assert stage.predicted.host_bytes == stage.offload.bytes
    assert offloading.simulation.step_s < recomputing.simulation.step_s
    assert offloading.simulation.total(0, "exposed_s") < recomputing.simulation.total(0, "exposed_s")
    assert offloading.simulation.exposed_copy_s(0) < 0.001 * offloading.simulation.step_s


def at_loss_bytes(decision: Decision) -> int:
    """What the layers of the first stage hold then."""
    (loss,) = (held for held in most_held(decision.job, decision.simulation, 0) if held.moment == "loss")
    return loss.layers_bytes


def test_what_comes_back_while_backward_runs_is_not_there_at_the_loss() -> None:
    """It was counted at the loss, too, where a last stage is often at its fullest: larger shares seemed not to fit."""
    decision = decided(job_of(0.3, tensor=4, sequence_parallel=True))
    simulation = decision.simulation
    at_loss, peak_bytes = at_loss_bytes(decision), simulation.memory(0).peak_bytes
    assert at_loss < peak_bytes
    assert held_by_moment(decision.job, simulation, 0)["loss"].activations == at_loss


def test_nothing_leaves_where_all_fits_or_nobody_asks() -> None:
    assert offloaded_bytes(decided(job_of(1.0)).plan) == [0]
    assert offloaded_bytes(decided(job_of(0.5, 0.0)).plan) == [0]


def test_a_stated_share_leaves_whatever_it_costs() -> None:
    kept = decided(job_of(1.0, 0.0)).simulation.memory(0).peak_bytes
    little, much = (decided(job_of(1.0, ratio, policy="none")) for ratio in (0.1, 0.6))
    (few,), (many,) = offloaded_bytes(little.plan), offloaded_bytes(much.plan)
    assert few == pytest.approx(0.1 * kept, rel=0.1)
    assert 5 * few < many <= 0.6 * kept
    assert little.simulation.exposed_copy_s(0) < much.simulation.exposed_copy_s(0)
    assert little.simulation.memory(0).peak_bytes <= kept - few


def test_every_one_of_several_stages_offloads() -> None:
    """Of two in flight nothing is offloaded between passes, so middle stages with few in flight offloaded nothing."""
    decision = decided(job_of(0.5, **TIGHT))
    for stage, in_flight, which in zip(decision.plan.stages, (2, 1), ("all", "at_once"), strict=True):
        assert stage.offload is not None
        assert (stage.offload.half_by_half, stage.predicted.host_bytes) == (which, in_flight * stage.offload.bytes)


def test_every_chunk_of_a_stage_offloads() -> None:
    """Of eight chunks, five in flight on the first stage: between passes only what is beyond four of these could leave."""
    job = job_of(0.5, pipeline=2, layers_per_chunk=4)
    decision, keeping = decided(job), decided(job.model_copy(update={"offload_ratio": 0.0}))
    assert decision.simulation.step_s < keeping.simulation.step_s
    for answer in decision.stages:
        entries = decision.plan.chunks_of(answer.stage)
        assert answer.asked.within
        assert all(entry.offload and entry.offload.half_by_half == "all" for entry in entries)
        assert sum(answer.host_sets) >= answer.in_flight
        assert answer.host_bytes == sum(
            sets * entry.offload.bytes for sets, entry in zip(answer.host_sets, entries, strict=True) if entry.offload
        )


def test_of_many_in_flight_what_is_faster_leaves_between_passes_or_within_them() -> None:
    """On the first of eight stages, where the one and the other are tried."""
    job = job_of(0.5, tensor=1, pipeline=8)
    decision = decided(job)
    first = decision.stages[0]
    assert (first.in_flight, first.asked.within) == (8, True)
    excluded = tuple((Share(ratio / 1000, within=True), 1) for ratio in range(1001)) * 2
    between = Stages(decision.job, analytic_profile(job)).answer(0, excluded)
    assert between.asked.ratio > 0
    assert first.seconds(job.microbatches) < between.seconds(job.microbatches)


def test_what_waits_hide_is_recomputed_and_does_not_leave() -> None:
    decision = decided(job_of(0.8, **EIGHT))
    assert offloaded_bytes(decision.plan) == [0]
    assert decision.simulation.total(0, "hidden_s") > 0


def test_the_host_takes_longer_for_halves_that_leave_alone() -> None:
    decision = decided(job_of(0.6))
    (answer,) = decision.stages
    assert 0 < answer.spared_bytes <= sum(chunk.bytes for chunk in answer.leaving)
    sections = (), decision.job.halves_on(0).elements()
    kept, all_leave = (host_s(analytic_profile(decision.job), answer.chunks, leaving) for leaving in sections)
    assert kept.both_s < answer.host.both_s < all_leave.both_s
    rehearsed_s = decision.simulation.total(0, "host_s") / decision.job.microbatches
    assert rehearsed_s == pytest.approx(answer.host.both_s, rel=0.05), "halves are whole, shares are not"


@settings(max_examples=10, deadline=None)
@given(
    st.floats(0.15, 1.0),
    st.sampled_from(["auto", "auto", 0.2, 0.7]),
    st.sampled_from(
        [{}, {"tensor": 2}, EIGHT, {"tensor": 4, "pipeline": 2}, {**TIGHT, "layers_per_chunk": 4}, {"tensor": 1, "pipeline": 8}]
    ),
    st.sampled_from(["planned", "planned", "none", "selective", "full"]),
    st.sampled_from(["h800-80g", "a100-80g"]),
)
def test_any_answer_fits_in_the_rehearsal(share: float, ratio: Any, layout: dict[str, Any], policy: str, cluster: str) -> None:
    job = job_of(share, ratio, policy, cluster, **layout)
    try:
        decision = decided(job)
    except Infeasible:
        return
    assert job.budget.activation_mib is not None
    for stage, memory in enumerate(decision.memory):
        assert decision.simulation.memory(stage).peak_bytes <= job.budget.activation_mib * MIB
        assert memory.total <= job.memory_budget_bytes
