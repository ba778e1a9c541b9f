"""No plan exceeds its budget, at any moment, on any chunk of any stage; and a planner that errs says so."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron_lynx.config.job import Budget, Job
from megatron_lynx.cost import budget as cost_budget
from megatron_lynx.errors import Infeasible, PlannerFault
from megatron_lynx.planner import decide, leanest
from megatron_lynx.planner.decision import Decision
from megatron_lynx.planner.evaluation import check_budget_kept, most_held
from megatron_lynx.planner.filling import Filling
from megatron_lynx.planner.loads import with_load
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import LinkPoint, Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.solver.answer import SolvedChunks
from megatron_lynx.timeline import MemoryCurve
from megatron_lynx.units import GIB, MIB
from tests.config.jobs import catalogued_job
from tests.heavier import rehearsed_with_load_of
from tests.stock.parts import memory_of_stages
from tests.uniform import uniform_plan

SMALL = {"layers": 8, "hidden": 2048, "ffn": 5504, "heads": 16, "kv_groups": 8, "vocab": 32_000}
EXPERTS = {"experts": {"count": 8, "per_token": 2, "ffn": 1024}}


def job_of(parallel, *, cluster="a100-80g", model=(), micro=1, microbatches=8, seq=2048, **fields) -> Job:
    """Eight small layers on GPUs, in bf16."""
    job = catalogued_job("llama3-8b", cluster, gpus=16, batch=16, seq=seq, parallel={"pipeline": 1}, policy="planned")
    data = job.model_dump(by_alias=True, exclude_unset=True)
    replicas = 16 // (parallel.get("tensor", 1) * parallel["pipeline"])
    data["model"] |= SMALL | dict(model)
    batch = {"micro": micro, "global": micro * microbatches * replicas}
    return Job.model_validate(data | {"parallel": {"distributed_optimizer": True, **parallel}, "batch": batch} | fields)


def with_budget(job: Job, **budget: float) -> Job:
    return job.model_copy(update={"budget": Budget(**budget)})


@st.composite
def splits(draw, parts: int) -> tuple[int, ...]:
    """Eight layers on so many virtual stages, evenly or not; with many, some are left without any."""
    cuts = sorted(draw(st.lists(st.integers(0 if parts > 4 else 1, 8), min_size=parts - 1, max_size=parts - 1)))
    split = tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, 8], strict=True))
    assume(parts > 4 or all(split))
    return split


@st.composite
def jobs(draw) -> Job:
    """As a planner may be asked: schedules, partitions, experts, offloading, sequence parallelism, optimizers."""
    tensor, pipeline, schedule = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4])), "flush"
    parallel = {"tensor": tensor, "pipeline": pipeline, "sequence_parallel": draw(st.booleans()) and tensor > 1}
    fields = {"offload_ratio": draw(st.sampled_from([0.0, "auto", 0.4])), "microbatches": draw(st.sampled_from([8, 16]))}
    kind = draw(st.sampled_from(["1F1B", "chunks", "without flushes", "auto"])) if pipeline > 1 else "1F1B"
    if kind == "auto":
        parallel["partition"] = "auto"
    elif pipeline > 1:
        parallel["partition"] = draw(splits(pipeline * (draw(st.sampled_from([2, 3])) if kind == "chunks" else 1)))
    experts = kind != "without flushes" and draw(st.booleans())
    if (experts and tensor == 1) or parallel["sequence_parallel"]:
        fields["model"] = (EXPERTS if experts else {}).items()
        parallel["expert"] = draw(st.sampled_from([1, 2])) if experts else 1
    if kind == "without flushes":
        schedule = "double_buffered"
        fields["defer_updates"] = draw(st.booleans())
    fields["optimizer"] = draw(st.sampled_from([{}, {"gradients": "bf16"}]))
    fields["overlap"] = {"gradients": draw(st.booleans()), "weight_gradients": draw(st.sampled_from(["auto", "none"]))}
    return job_of(parallel, schedule=schedule, **fields)


BUDGETS = st.tuples(st.sampled_from(["device", "layers", "both"]), st.floats(0.02, 1))
"""Of what, and where between the least that can be held and what keeping everything takes."""


def budget_of(job: Job, profile: Profile, of: str, share: float) -> Budget:
    kept = memory_of_stages(job.model_copy(update={"policy": "none", "offload_ratio": 0.0}))
    lean = leanest(job, profile).memory
    device = [max(each.total for each in memory) for memory in (lean, kept)]
    layers = [max(each.activations + each.staging + each.recomputed for each in memory) for memory in (lean, kept)]
    memory_gib, activation_mib = (
        (least + share * (most - least)) / unit for (least, most), unit in ((device, GIB), (layers, MIB))
    )
    return Budget(
        memory_gib=None if of == "layers" else memory_gib, activation_mib=None if of == "device" else max(1.0, activation_mib)
    )


def keeps_budget(job: Job, of: str, share: float) -> None:
    profile = analytic_profile(job)
    job = job.model_copy(update={"budget": budget_of(job, profile, of, share)})
    try:
        decided = decide(job, profile)
    except Infeasible:
        assume(False)
    simulation = rehearse(decided.plan, profile, job=decided.job)
    check_budget_kept(decided.job, simulation)
    for stage, memory in enumerate(decided.memory):
        assert simulation.memory(stage) == decided.simulation.memory(stage), "what was checked is the plan's own rehearsal"
        assert memory.total <= job.memory_budget_bytes, "no plan says that it exceeds its budget"
    heaviest_load_fits(decided, profile)


def heaviest_load_fits(decided: Decision, profile: Profile) -> None:
    """Experts may get as many rows as the plan says."""
    for entry in decided.plan.stages:
        if entry.predicted.moe_load:
            loaded = with_load(decided.job, entry.predicted.moe_load)
            simulation = rehearsed_with_load_of(loaded, decided.plan, profile)
            held = max(each.device_bytes for each in most_held(loaded, simulation, entry.stage))
            assert held <= decided.job.memory_budget_bytes


@settings(max_examples=4, deadline=None)
@given(jobs(), BUDGETS)
def test_every_plan_keeps_its_budget(job, budget) -> None:
    keeps_budget(job, *budget)


LITTLE_ROOM = job_of({"pipeline": 4, "partition": (1, 2, 1, 0, 1, 2, 1, 0)}, overlap={"gradients": False})
"""Stages receive a gradient right after the first chunk's backward, and recompute meanwhile."""


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=150, deadline=None)
@given(jobs(), BUDGETS)
@example(LITTLE_ROOM, ("device", 0.02))
@example(job_of({"pipeline": 4, "partition": (4, 1, 2, 1)}, microbatches=16, offload_ratio=0.4), ("device", 0.02))
def test_many_plans_keep_their_budgets(job, budget) -> None:
    keeps_budget(job, *budget)


def within(job: Job, share: float) -> tuple[Job, Profile]:
    profile = analytic_profile(job)
    return job.model_copy(update={"budget": budget_of(job, profile, "device", share)}), profile


def message_of(job: Job, profile: Profile) -> str:
    with pytest.raises(PlannerFault) as found:
        decide(job, profile)
    return str(found.value)


def test_a_last_chunk_with_the_whole_budget_is_found(monkeypatch) -> None:
    """Put in by hand once, it made plans of 58.75 GiB at a budget of 57, and no test failed."""
    job, profile = within(job_of({"pipeline": 2, "partition": (2, 2, 2, 2)}), 0.7)
    assert decide(job, profile)
    monkeypatch.setattr(SolvedChunks, "beside_bytes", 0)
    message = message_of(job, profile)
    assert message.startswith("the planner made a plan that exceeds its budget; this is an error of megatron-lynx\n")
    assert "  - stage 1, chunk 1, loss: found 2.97 GiB on the device, " in message
    assert "; report it with the job (or the launch), the cluster and the budget" in message


@dataclass(frozen=True)
class Fuller(Simulation):
    """A simulation whose first stage holds more for a while."""

    begin_s: float
    end_s: float
    added_bytes: int

    def memory(self, stage: int) -> MemoryCurve:
        curve = super().memory(stage)
        if stage:
            return curve
        times_s = sorted({*curve.times_s, self.begin_s, self.end_s})
        held = [curve.bytes[bisect_right(curve.times_s, time_s) - 1] for time_s in times_s]
        more = [self.added_bytes * (self.begin_s <= time_s < self.end_s) for time_s in times_s]
        return MemoryCurve(tuple(times_s), tuple(map(sum, zip(held, more, strict=True))))


def test_what_is_fullest_while_no_pass_runs_is_found() -> None:
    """While a gradient is awaited, where the uniform policy recomputes, and between passes. The guard was blind there."""
    job, profile = within(job_of({"pipeline": 4}, model={"vocab": 512}), 0.1)
    decided = decide(job, profile)
    room = job.memory_budget_bytes - decided.memory[0].total
    simulation = rehearse(uniform_plan(job), profile, job=decided.job)
    executed = simulation.executed[0]
    received = next(each for each in executed if each.action.kind == "R" and each.end_s > each.start_s)
    gaps = ((before.end_s, after.start_s) for before, after in pairwise(executed) if before.end_s < after.start_s)
    for (begin_s, end_s), found in (((received.start_s, received.end_s), "chunk 0, backward"), (next(gaps), "between passes")):
        third_s = (end_s - begin_s) / 3
        fuller = partial(Fuller, simulation.executed, simulation.copied, begin_s + third_s, end_s - third_s)
        check_budget_kept(decided.job, fuller(0))
        with pytest.raises(PlannerFault, match=f"stage 0, {found}: found"):
            check_budget_kept(decided.job, fuller(decided.memory[0].total + room))


def test_weight_gradients_without_room_are_found(monkeypatch) -> None:
    job, profile = within(job_of({"tensor": 4, "pipeline": 2}, cluster="a100-80g-pcie", model={"vocab": 512}), 0.5)
    assert decide(job, profile).weight_gradients.startswith("deferred")
    monkeypatch.setattr(Filling, "_claimed", lambda filling, *held: 0 * filling._free)
    monkeypatch.setattr(Decision, "excess_bytes", lambda *held: 0)
    assert "stage 0, chunk 0, backward: found" in message_of(job, profile)


def test_copies_that_lag_are_found(monkeypatch) -> None:
    job, profile = within(job_of({"pipeline": 4, "partition": (1,) * 8}, offload_ratio=1.0, model={"vocab": 512}), 0.2)
    profile = profile.model_copy(update={"links": tuple(_slower(each) for each in profile.links)})
    with pytest.raises(Infeasible, match="copies that lag behind"):
        decide(job, profile)
    monkeypatch.setattr(Decision, "excess_bytes", lambda *held: 0)
    assert "stage 0, chunk 0, forward: found" in message_of(job, profile)


def _slower(link: LinkPoint) -> LinkPoint:
    return link.model_copy(update={"seconds": 20 * link.seconds}) if link.kind == "host" else link


def test_updates_without_flushes_hold_micro_batches_too(monkeypatch) -> None:
    """Gradients in bf16 are copied into fp32 for an update. Without flushes all micro-batches in flight but one are there then,
    which nobody counted: a plan for 32.75 GiB came to 35.3."""
    flushless = {"schedule": "double_buffered", "optimizer": {"gradients": "bf16"}}
    job, profile = within(job_of({"pipeline": 4, "distributed_optimizer": False}, model={"vocab": 512}, **flushless), 0.4)
    decided = decide(job, profile)
    for stage, stated in enumerate(decided.memory):
        (update,) = (held for held in most_held(decided.job, decided.simulation, stage) if held.moment == "update")
        assert update.device_bytes == stated.totals["update"]
        assert stage == 3 or cost_budget.parts_beside_layers(job, stage).at("update").messages > 0
    without_updates = lambda job, stage: job.memory_budget_bytes - cost_budget.most_beside_layers(job, stage).total  # noqa: E731
    monkeypatch.setattr(cost_budget, "_on_device_bytes", without_updates)
    assert "stage 0, first update: found" in message_of(job, profile)


def test_weight_gradients_that_wait_for_a_forward_are_there_in_the_embeddings_backward() -> None:
    """It was said that this moment holds what other micro-batches keep, 2.2 GiB too little for 48 layers with t = 8."""
    job = with_budget(job_of({"tensor": 8, "pipeline": 1}, micro=4), memory_gib=60)
    decided = decide(job, analytic_profile(job))
    assert decided.plan.stages[0].rules[0].weight_gradients["linear_fc2"] == ("fwd.attention.0",)
    held = {each.moment: each for each in most_held(decided.job, decided.simulation, 0) if each.chunk == 0}
    assert held["embedding_backward"].layers_bytes > 0
    assert decided.memory[0].totals["embedding_backward"] == held["embedding_backward"].device_bytes


def test_a_chunk_without_layers_beside_one_that_defers_has_a_plan() -> None:
    """It once ended in an IndexError: the chunk's forward was to hide weight gradients of the other."""
    job, profile = within(job_of({"tensor": 4, "pipeline": 2, "partition": (4, 2, 2, 0)}, cluster="a100-80g-pcie"), 0.9)
    assert any(entry.defers for entry in decide(job, profile).plan.stages)
