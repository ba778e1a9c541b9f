"""Activations on the host: the same bits, in the order that rule R9 asks for, and as many bytes as the plan says."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from itertools import compress, product
from typing import Any

import pytest
from hypothesis import strategies as st

from megatron_lynx.config.job import Job
from megatron_lynx.cost.recompute import kept_bytes
from megatron_lynx.figures import Figures
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.profile import LinkPoint, Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.runtime.host_memory import ALIGNMENT
from megatron_lynx.schedule.flushes import sets_on_host
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.testbed.ranks import RankError, RankPool
from tests.deferring import deferring
from tests.long import long
from tests.plan.strategies import plans_for, samples
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import checkpointed
from tests.transparency.offload_trials import bytes_at_halves, bytes_at_marks, fail_and_recover, fail_mid_step, reshape
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_every_bit import OVERLAPPED, checked
from tests.transparency.trials import Outcome, Trial, compare_with_stock

Pools = Callable[[int], RankPool]

RATIOS = (0.0, 0.3, 0.63, 1.0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "PP2": {"pipeline": 2, "microbatches": 4},
    "TP2xPP2+SP": {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "microbatches": 3},
    "PP2xVPP2": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
    "TP2xPP2xVPP2+SP": {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "microbatches": 4, "layers_per_chunk": 1},
}
BLOCKS = 32
"""Of one micro-batch of one chunk, at most, that end between multiples of `ALIGNMENT`."""
every_model = pytest.mark.parametrize("like", ["gpt", "llama"])


def layer_bytes(job: Job) -> int:
    """What one layer keeps of one micro-batch where nothing is recomputed."""
    return kept_bytes(LayerShape.of(job))


def chunk_bytes(job: Job) -> int:
    return len(job.layers_of(0)) * layer_bytes(job)


@pytest.mark.parametrize(
    ("layout", "like"),
    [
        ("TP2xPP2xVPP2+SP", "gpt"),
        *long(("PP2", "gpt"), ("PP2", "llama"), ("PP2xVPP2", "gpt"), *product(["TP2xPP2+SP"], ["gpt", "llama"])),
    ],
)
def test_every_ratio_alone_and_with_recomputation(pool_of: Pools, layout: str, like: Any) -> None:
    job = tiny_job(like, **LAYOUTS[layout])
    everything = recomputable(job, gather=True)
    keeping, recomputing = plan_for(job, lambda layer: ()), plan_for(job, lambda layer: everything)
    mixed = plan_for(job, lambda layer: ["input_layernorm", "core_attention", "activation"][layer % 2 :])
    size = chunk_bytes(job)
    candidates = [offloading(keeping, int(ratio * size)) for ratio in RATIOS]
    candidates += [offloading(mixed, size), offloading(recomputing, int(0.1 * size))]
    for outcomes in checked(pool_of, job, candidates, Trial(steps=2 if layout == "PP2" else 1)):
        for plan, outcome in zip(candidates, outcomes, strict=True):
            assert_adds_up(plan, outcome.planned.counts[-1])


def assert_adds_up(plan: Plan, counts: Figures) -> None:
    """What one step's figures say, in traces, `compare` and logs alike."""
    assert counts.offloaded_bytes == counts.reloaded_bytes
    policies = [entry.offload for entry in plan.stages if entry.offload is not None]
    if not policies:
        assert (counts.offloaded_bytes, counts.host_bytes, counts.exposed_copy_s) == (0, 0, 0)
    else:
        most, parallel = max(policy.bytes for policy in policies), plan.parallel
        assert counts.offloaded_bytes <= plan.batch.microbatches * parallel.chunks * most
        sets = max(
            sum(sets_on_host(parallel.pipeline, stage, plan.batch.microbatches, parallel.chunks))
            for stage, policy in product(range(parallel.pipeline), policies)
        )
        assert counts.host_bytes <= sets * (most + BLOCKS * ALIGNMENT), "as many micro-batches as the schedule has there at once"


def within(job: Job, *, every: bool = False) -> list[Plan]:
    """Everything that may leaves within its own micro-batch; a part, slowly; a little, of what stays beside recomputations.
    `every`: of every micro-batch, and not only where its own backward follows at once."""
    keeping, everything = plan_for(job, lambda layer: ()), recomputable(job, gather=job.parallel.sequence_parallel)
    mixed = plan_for(job, lambda layer: ["input_layernorm", "core_attention", "activation"][layer % 2 :])
    size = chunk_bytes(job)
    return [
        offloading(keeping, size, pace=size, every=every),
        offloading(keeping, int(0.63 * size), pace=size // 16, every=every),
        offloading(mixed, size, pace=size // 8, every=every),
        offloading(plan_for(job, lambda layer: everything), size, pace=size, every=every),
    ]


@pytest.mark.parametrize(
    ("like", "layout"),
    [
        ("llama", {"microbatches": 2}),
        ("gpt", {"tensor": 2, "sequence_parallel": True}),
        *long(("gpt", {"tensor": 2}), ("llama", {"pipeline": 2, "microbatches": 3}), ("gpt", LAYOUTS["PP2xVPP2"])),
    ],
    ids=str,
)
def test_half_by_half_within_a_micro_batch(pool_of: Pools, like: Any, layout: dict[str, Any]) -> None:
    """Of one stage, of the last stage, of the model's last chunk. Copies are late, what was let go holds NaN."""
    job = tiny_job(like, **layout)
    for outcomes in checked(pool_of, job, within(job), Trial(steps=2, tampered=True, canaries=True)):
        for outcome in outcomes:
            counts = outcome.planned.counts[-1]
            assert counts.offloaded_bytes == counts.reloaded_bytes > 0
            assert outcome.planned.overwritten > 0
            assert_in_order(outcome)


@pytest.mark.parametrize(
    ("like", "layout"),
    [
        ("llama", {"pipeline": 3, "layers": 6, "microbatches": 4}),
        *long(("gpt", LAYOUTS["TP2xPP2+SP"]), ("gpt", LAYOUTS["TP2xPP2xVPP2+SP"])),
    ],
    ids=str,
)
def test_half_by_half_with_other_passes_between(pool_of: Pools, like: Any, layout: dict[str, Any]) -> None:
    """On every stage, with as many micro-batches on the host as are in flight. Copies are late, what was let go holds NaN; a half
    whose recomputation begins before the backward stays, and finds what it kept."""
    job = tiny_job(like, **layout)
    plans = within(job, every=True)
    for stage, outcomes in enumerate(checked(pool_of, job, plans, Trial(steps=2, tampered=True, canaries=True))):
        for plan, outcome in zip(plans, outcomes, strict=True):
            counts, policy = outcome.planned.counts[-1], plan.stages[0].offload
            assert policy is not None
            assert counts.offloaded_bytes == counts.reloaded_bytes <= job.microbatches * job.chunks * policy.bytes
            assert counts.offloaded_bytes or plan is plans[-1], "of a layer that recomputes everything only its input could leave"
            assert_in_order(outcome)
            if job.chunks == job.parallel.tensor == 1:
                in_flight = min(job.microbatches, job.parallel.pipeline - stage)
                of_one = counts.offloaded_bytes // job.microbatches
                assert in_flight * of_one <= counts.host_bytes <= in_flight * (of_one + BLOCKS * ALIGNMENT)


def test_half_by_half_beside_weight_gradients_in_waits_and_in_a_second_thread(pool_of: Pools) -> None:
    job = tiny_job("gpt", tensor=2, sequence_parallel=True, layers=2)
    put_off = [deferring(plan) for plan in within(job)[1:]]
    checked(pool_of, job, put_off, Trial(training={"ddp": True}, model={"gradient_accumulation_fusion": True}))
    checked(pool_of, job, within(job)[1:3], Trial(backward_thread=True, steps=1))


def test_what_experts_keep_goes_half_by_half(pool_of: Pools) -> None:
    """Rows differ from one micro-batch to the next, and so do the sizes of what leaves."""
    experts = {"count": 4, "per_token": 2, "ffn": 16, "layers": "all"}
    job = tiny_job("gpt", layers=2, microbatches=3, bias=False, experts=experts)
    plan = plan_for(job, lambda layer: ["input_layernorm"])
    candidates = [offloading(plan, 10**8, pace=10**4, experts=True), offloading(plan, 10**8, pace=10**4)]
    ((both, dense),) = checked(pool_of, job, candidates, Trial())
    assert both.planned.counts[-1].offloaded_bytes > dense.planned.counts[-1].offloaded_bytes > 0


@pytest.mark.parametrize("like", ["gpt", *long("llama")])
def test_random_plans(pool_of: Pools, like: Any) -> None:
    job = tiny_job(like, **LAYOUTS["TP2xPP2xVPP2+SP"])
    of_this_job = plans_for(job, whole=True)
    offloaded = st.builds(
        lambda plan, size, smallest: offloading(plan, size, smallest=smallest),
        of_this_job,
        st.integers(1, 2 * chunk_bytes(job)),
        st.sampled_from([1, 1024, 4096]),
    )

    checked(pool_of, job, samples(offloaded, 4), Trial(steps=1))


PP4 = {"pipeline": 4, "microbatches": 6}


@pytest.mark.parametrize(
    ("layout", "like"),
    [(PP4, "gpt"), (LAYOUTS["PP2xVPP2"], "llama"), *long((PP4, "llama"), (LAYOUTS["PP2xVPP2"], "gpt"))],
    ids=str,
)
def test_late_copies_and_overwritten_memory(pool_of: Pools, like: Any, layout: dict[str, Any]) -> None:
    """Every copy takes a random time; what was let go, what is not reloaded yet and what was reloaded holds NaN."""
    job = tiny_job(like, **layout)
    recomputed = ["input_layernorm", "rotary", "core_attention", "activation"]
    candidates = [
        offloading(plan_for(job, lambda layer: ()), int(0.63 * chunk_bytes(job))),
        offloading(plan_for(job, lambda layer: recomputed), chunk_bytes(job)),
    ]
    if job.chunks == 1:
        candidates.append(offloading(plan_for(job, lambda layer: recomputed[:1]), chunk_bytes(job), beside="avoid"))
    results = checked(pool_of, job, candidates, Trial(steps=1, tampered=True, canaries=True))
    for stage, outcomes in enumerate(results):
        for outcome in outcomes:
            assert_in_order(outcome)
            at_once = job.chunks == 1 and stage == job.parallel.pipeline - 1
            assert bool(outcome.planned.copies) != at_once, "the last stage's backwards follow their forwards"
            assert outcome.planned.overwritten >= len(outcome.planned.copies) // 4


def assert_in_order(outcome: Outcome) -> None:
    """On every piece of host memory: out, then back, then the next out; never one into the other."""
    of_memory: dict[int, list[str]] = defaultdict(list)
    for event, host in outcome.planned.copies:
        of_memory[host].append(event)
    for events in of_memory.values():
        assert events == ["out begins", "out ends", "back begins", "back ends"] * (len(events) // 4)


def test_parameters_stay_themselves(pool_of: Pools) -> None:
    """Fused weight gradients leave a mark on the parameter that backward is handed; DDP asserts that it finds it (rule R11)."""
    job = tiny_job("llama", pipeline=2, replicas=2, distributed_optimizer=True, dtype="bf16", microbatches=3)
    fused = {"gradient_accumulation_fusion": True, "qk_layernorm": True}
    plan = offloading(plan_for(job, lambda layer: ["activation"]), chunk_bytes(job))
    checked(pool_of, job, [plan], Trial(steps=2, training=OVERLAPPED, model=fused, compared="weights"))


@pytest.mark.quick
def test_backward_in_a_second_thread(pool_of: Pools) -> None:
    """As on CUDA, where autograd's own threads ask for what was saved."""
    job = tiny_job("gpt", pipeline=2, microbatches=4)
    checked(pool_of, job, [offloading(plan_for(job, lambda layer: ()), chunk_bytes(job))], Trial(backward_thread=True))


def test_copies_leave_behind_a_forward_and_return_before_their_backward(pool_of: Pools) -> None:
    """The plan decides when (rule R1): a way out begins behind its forward; a reload is asked for when the
    pass before its own backward begins. When the copier's thread gets to it is the machine's to say."""
    job = tiny_job("gpt", pipeline=4, microbatches=6)
    plan = offloading(plan_for(job, lambda layer: ()), chunk_bytes(job))
    for outcomes in checked(pool_of, job, [plan], Trial(steps=1, traced=True))[:3]:
        events = outcomes[0].planned.events
        for number in range(job.microbatches):
            mine = {kind: spans(events, kind, number) for kind in ("forward", "offload", "reload", "backward")}
            assert mine["forward"][-1]["end_s"] <= mine["offload"][0]["start_s"]
            assert mine["offload"][0]["end_s"] <= mine["reload"][-1]["start_s"]
            if number > 1:
                assert spans(events, "backward", number - 2)[-1]["end_s"] <= mine["reload"][0]["start_s"], "not two ahead"


def test_copies_that_avoid_messages_run_beside_none(pool_of: Pools) -> None:
    """While a gradient is waited for nothing is copied, wherever the plan says so."""
    job = tiny_job("gpt", pipeline=4, microbatches=6)
    plan = offloading(plan_for(job, lambda layer: ()), chunk_bytes(job), beside="avoid")
    for outcomes in checked(pool_of, job, [plan], Trial(steps=1, traced=True))[:3]:
        events = outcomes[0].planned.events
        copies = [event for event in events if event["kind"] in ("offload", "reload")]
        received = [event for event in events if event["kind"] == "recv"]
        assert copies
        assert len(received) == job.microbatches
        beside = [(copy, recv) for copy in copies for recv in received if starts_in(copy, recv) or starts_in(recv, copy)]
        assert beside == []


def starts_in(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(other["start_s"] <= one["start_s"] < other["end_s"])


def spans(events: list[dict[str, Any]], kind: str, micro_batch: int) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind and event["micro_batch"] == micro_batch]


def test_memory_does_not_grow(pool_of: Pools) -> None:
    """Thirty steps: host memory is what the plan says from the first one on, and nothing piles up on the device."""
    job = tiny_job("gpt", pipeline=2, microbatches=2, layers=2)
    plan = offloading(plan_for(job, lambda layer: ()), chunk_bytes(job) // 2)
    outcomes = checked(pool_of, job, [plan], Trial(steps=30, alive=True, training={"optimizer": None}))
    first_stage = outcomes[0][0].planned
    (host_bytes,) = {counts.host_bytes for counts in first_stage.counts}
    assert 0 <= host_bytes - chunk_bytes(job) // 2 < 100 * 256, (
        "one micro-batch on the host at once; blocks begin at multiples of 256"
    )
    assert {counts.offloaded_bytes for counts in first_stage.counts} == {2 * (chunk_bytes(job) // 2)}
    assert max(first_stage.live_bytes[15:]) <= max(first_stage.live_bytes[:15])


@pytest.mark.parametrize("policy", [*long("none"), "balanced"])
def test_device_bytes_are_what_the_planner_says(pool_of: Pools, policy: Any) -> None:
    """At the end of every forward, on both stages, up to everything that can leave: small tensors and what Megatron received
    stay, and the planner does not promise otherwise."""
    job = tiny_job("gpt", pipeline=2, layers=8, layers_per_chunk=1, microbatches=4).model_copy(update={"policy": policy})
    profile = made_up_profile(job)
    instant = LinkPoint(kind="host", bytes=1, seconds=1e-12)  # per byte; copies begin behind the forward whose end is looked at
    profile = profile.model_copy(update={"links": (*profile.links, instant)})
    plans = [make_plan(job.model_copy(update={"offload_ratio": ratio}), profile) for ratio in (0.0, 0.3, 0.5, 0.63, 1.0)]
    counted_as_said(pool_of(2), job, profile, plans)


@pytest.mark.parametrize("checkpoint", ["layer", *long({"layers": 2}, "halves")], ids=str)
def test_device_bytes_of_checkpoints_whose_inputs_leave(pool_of: Pools, checkpoint: Any) -> None:
    """Where nothing but inputs is kept, nothing but inputs leaves; what Megatron received stays."""
    job = tiny_job("gpt", pipeline=2, layers=12, layers_per_chunk=3, microbatches=4)
    profile = made_up_profile(job)
    instant = LinkPoint(kind="host", bytes=1, seconds=1e-12)
    profile = profile.model_copy(update={"links": (*profile.links, instant)})
    kept = checkpointed(plan_for(job, lambda layer: ()), checkpoint)
    plans = [offloading(kept, times * profile.attention.input_bytes) for times in (0, 1, 6)]
    counted_as_said(pool_of(2), job, profile, plans)


def counted_as_said(pool: RankPool, job: Job, profile: Profile, plans: list[Plan]) -> None:
    of_stage = pool.run(bytes_at_marks, job, plans)
    assert all(max(counted) < max(kept) for kept, *_, counted in of_stage)
    for stage, (kept, *counted) in enumerate(of_stage):
        simulated_kept, *simulated = (after_forwards(rehearse(plan, profile), stage) for plan in plans)
        assert len(kept) == len(simulated_kept) == job.microbatches * job.chunks
        for plan, found, said in zip(plans[1:], counted, simulated, strict=True):
            predicted = [bytes_ - before + now for bytes_, before, now in zip(kept, simulated_kept, said, strict=True)]
            off = max(abs(one / other - 1) for one, other in zip(predicted, found, strict=True))
            assert off <= 0.02, f"stage {stage}, {plan.stages[stage].offload}: {found} bytes, {predicted} predicted"


def after_forwards(simulation: Simulation, stage: int) -> list[int]:
    """What a stage's layers hold at the end of each forward, before the next pass begins and asks for reloads."""
    curve, found = simulation.memory(stage), []
    for end_s in (each.end_s for each in simulation.executed[stage] if each.action.kind == "F"):
        asked_next = sum(copy.bytes for copy in simulation.copied[stage] if copy.action.kind == "B" and copy.start_s == end_s)
        found.append(curve.bytes[bisect_right(curve.times_s, end_s) - 1] - asked_next)
    return found


@pytest.mark.parametrize(("like", "pipeline", "chunks"), [("gpt", 1, 1), ("gpt", 2, 2), *long(("gpt", 3, 1), ("llama", 1, 1))])
def test_device_bytes_within_a_micro_batch_are_what_the_planner_says(
    pool_of: Pools, like: Any, pipeline: int, chunks: int
) -> None:
    """Before every half's forward and before its backward, to the byte, copies under way included, on every stage. Of the tensor
    at the edge of what leaves the rest is there twice until its turn. What is recomputed while a gradient is received stays."""
    several = {"layers_per_chunk": 2} if chunks > 1 else {}
    job = tiny_job(like, layers=4 * pipeline, pipeline=pipeline, microbatches=chunks + pipeline, **several)
    profile = made_up_profile(job)
    instant = LinkPoint(kind="host", bytes=1, seconds=1e-15)  # what compute waits for would not change bytes, but their places
    profile = profile.model_copy(update={"links": (*profile.links, instant)})
    smallest, size = profile.attention.input_bytes // 4, chunk_bytes(job)
    kept, recomputed = (plan_for(job, lambda layer, items=items: items) for items in ((), ["input_layernorm", "activation"]))  # type: ignore[misc]
    candidates = [
        plan
        for plain in (kept, recomputed)
        for plan in (
            offloading(plain, 1, smallest=10**9, pace=1, every=pipeline > 1),  # nothing is as large
            offloading(plain, size, smallest=smallest, pace=size, every=pipeline > 1),
            offloading(plain, int(0.3 * size), smallest=smallest, pace=size // 12, every=pipeline > 1),
        )
    ]
    stayed = 0
    for stage, found in enumerate(pool_of(pipeline).run(bytes_at_halves, job, candidates)):
        said = [at_halves(plan, profile, stage) for plan in candidates]
        assert len(found[0]) == len(said[0]) == 4 * job.microbatches * sum(job.chunk_layers(stage))
        as_said(job, profile, candidates, found, said)
        stayed += len(said[0]) - len(said[-1])
    assert stayed == (pipeline * chunks - 1) * job.microbatches, "one of each chunk that receives a gradient"


def as_said(job: Job, profile: Profile, candidates: list[Plan], found: list[list[int]], said: list[list[int]]) -> None:
    size, halves = chunk_bytes(job), 2 * len(job.layers_of(0))
    for at, plan in enumerate(candidates):
        base = at - at % 3
        gone, predicted = ([one - two for one, two in zip(of[at], of[base], strict=True)] for of in (found, said))
        assert at % 3 == 0 or min(predicted) < -0.1 * size, plan.stages[0].offload
        for number, (one, two) in enumerate(zip(gone, predicted, strict=True)):
            split = at % 3 == 2 and (job.gpus > 1 or number % (2 * halves) < halves)
            assert one == two or (split and two < one < two + profile.attention.input_bytes * 4), (at, number, gone, predicted)


def at_halves(plan: Plan, profile: Profile, stage: int) -> list[int]:
    """What the layers of a stage hold before each half's forward, if any of it may leave, and when each half's backward has asked
    for what it needs."""
    simulation, entries = rehearse(plan, profile), plan.chunks_of(stage)
    curve, times_s, timetable = simulation.memory(stage), list[float](), timetable_of(plan, stage)
    for each in simulation.executed[stage]:
        entry, halves_of_chunk = entries[each.action.chunk], timetable.chunks[each.action.chunk]
        may_leave = [not entry.offload.stays(half) for half in halves_of_chunk] if entry.offload else []
        kind = "forward" if each.action.kind == "F" else "backward"
        halves = sorted((span.start_s, span.end_s) for span in each.content.spans if span.kind == kind)
        if kind == "forward":
            begins_s = [each.start_s, *(each.start_s + end_s for _, end_s in halves[:-1])]
            times_s += compress(begins_s, may_leave)
        else:
            times_s += [each.start_s + start_s for start_s, _ in halves]
    return [curve.bytes[bisect_right(curve.times_s, time_s) - 1] for time_s in times_s]


def test_another_number_of_micro_batches_and_another_sequence_length(pool_of: Pools) -> None:
    """Host memory is made anew; from the first other length on its blocks only grow, and soon none is made.
    What evaluates between the steps copies nothing."""
    longer, shorter = {"microbatches": 6, "seq": 32}, {"microbatches": 2}
    shapes: list[dict[str, Any]] = [{"microbatches": 2}, {"microbatches": 6}, longer, shorter, longer, shorter]
    jobs = [tiny_job("llama", pipeline=4, **shape) for shape in shapes]
    plan = offloading(plan_for(jobs[0], lambda layer: ()), chunk_bytes(jobs[0]))
    first = pool_of(4).run(reshape, jobs, plan)[0]
    assert first.equal == [True] * 6
    assert first.copied_by_evaluation == [0] * 6
    assert 2 * first.host_bytes[1] == 3 * first.host_bytes[0]
    assert first.host_bytes[3] == first.host_bytes[4] == first.host_bytes[5], "whatever comes"
    assert first.host_bytes[1] < first.host_bytes[5] < 3 * first.host_bytes[1]


@pytest.mark.parametrize("direction", ["offload", "reload"])
def test_a_copy_that_fails_fails_the_step_and_nothing_is_left(pool_of: Pools, direction: Any) -> None:
    job = tiny_job("llama", microbatches=3)
    plan = offloading(plan_for(job, lambda layer: ["activation"]), chunk_bytes(job), pace=chunk_bytes(job))
    (failed,) = pool_of(1).run(fail_and_recover, job, plan, direction)
    assert failed.error == "the link is down"
    assert (failed.left, failed.busy, failed.threads, failed.equal_afterwards) == ([], False, [], True)


@pytest.mark.parametrize(("where", "layout"), [("backward", "PP2xVPP2"), ("offload", "TP2xPP2xVPP2+SP")])
def test_an_interleaved_step_that_fails_in_the_middle(where: Any, layout: str) -> None:
    """The others, its tensor-parallel peer too, wait for messages that never come, no longer than their groups do. Nothing of the
    step is held anywhere, and the plan can be removed. That the next step is right: `tests/runtime/test_offloading_engine.py`."""
    job = tiny_job("llama", **LAYOUTS[layout])
    plan = offloading(plan_for(job, lambda layer: ["activation"], windows=False), chunk_bytes(job))
    with RankPool(job.gpus) as pool:  # of its own: its groups are gone afterwards
        first, *others = pool.run(fail_mid_step, job, plan, where)
    if where == "backward":
        assert first.error == "ValueError: a backward in the middle"
    else:
        assert "OSError: the link is down" in first.error
    for other in others:
        assert other.error, "it was told by its group"
        assert "OSError" not in other.error
    for rank in (first, *others):
        assert (rank.left, rank.busy, rank.threads) == ([], False, [])


def test_a_host_that_is_too_small_is_refused_before_training(pool_of: Pools) -> None:
    job = tiny_job("gpt", pipeline=2, microbatches=3)
    with pytest.raises(RankError, match=r"(?s)the host has too little memory.*available to this rank.*1000000000000000 bytes"):
        pool_of(2).run(compare_with_stock, job, [offloading(plan_for(job, lambda layer: ()), 10**15)], Trial())
