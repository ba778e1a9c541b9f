"""Activations on the host: the same bits, in the order that rule R9 asks for, and as many bytes as the plan says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_lynx.config.job import Job
from megatron_lynx.cost.layer import LayerShape, kept_bytes
from megatron_lynx.plan.plan import BatchFacts, ModelFacts, ParallelFacts, Plan
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.plan.strategies import plans
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, replayable
from tests.transparency.test_every_bit import checked
from tests.transparency.trials import Outcome, Trial

Pools = Callable[[int], RankPool]

RATIOS = (0.0, 0.3, 0.63, 1.0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "PP2": {"pipeline": 2, "microbatches": 4},
    "TP2xPP2+SP": {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "microbatches": 3},
    "PP2xVPP2": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
    "TP2xPP2xVPP2+SP": {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "microbatches": 4, "layers_per_chunk": 1},
}
every_model = pytest.mark.parametrize("like", ["gpt", "llama"])


def layer_bytes(job: Job) -> int:
    """What one layer keeps of one micro-batch where nothing is replayed."""
    return kept_bytes(LayerShape.of(job), "none")


def chunk_bytes(job: Job) -> int:
    return len(job.layers_of(0)) * layer_bytes(job)


@every_model
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_ratio_alone_and_with_replay(pool_of: Pools, layout: str, like: Any) -> None:
    job = tiny_job(like, **LAYOUTS[layout])
    everything = replayable(job, gather=True)
    keeping, replaying = plan_for(job, lambda layer: ()), plan_for(job, lambda layer: everything)
    mixed = plan_for(job, lambda layer: ["input_layernorm", "core_attention", "activation"][layer % 2 :])
    size = chunk_bytes(job)
    candidates = [offloading(keeping, int(ratio * size)) for ratio in RATIOS]
    candidates += [offloading(mixed, int(ratio * size)) for ratio in (0.3, 1.0)]
    candidates += [offloading(replaying, int(0.1 * size), prefetch=2), offloading(replaying, size)]
    for outcomes in checked(pool_of, job, candidates):
        for plan, outcome in zip(candidates, outcomes, strict=True):
            last = outcome.planned.counts[-1]
            assert last.offloaded_bytes == last.reloaded_bytes
            assert plan.stages[0].offload is not None or last.offloaded_bytes == 0


@pytest.mark.parametrize("like", ["gpt", "llama"])
def test_random_plans(pool_of: Pools, like: Any) -> None:
    job = tiny_job(like, **LAYOUTS["TP2xPP2xVPP2+SP"])
    parallel = job.parallel.model_dump(include=ParallelFacts.model_fields.keys())
    of_this_job = plans(
        model=ModelFacts(**{name: getattr(job.model, name) for name in ModelFacts.model_fields}),
        parallel=ParallelFacts(chunks=job.chunks, **parallel),
        batch=BatchFacts(micro=job.batch.micro, microbatches=job.microbatches),
        partition=job.partition,
        whole=True,
    )
    offloaded = st.builds(
        lambda plan, size, smallest, prefetch: offloading(plan, size, smallest=smallest, prefetch=prefetch),
        of_this_job,
        st.integers(1, 2 * chunk_bytes(job)),
        st.sampled_from([1, 1024, 4096]),
        st.integers(1, 3),
    )

    @settings(
        max_examples=1,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(st.lists(offloaded, min_size=6, max_size=6))
    def check(candidates: list[Plan]) -> None:
        checked(pool_of, job, candidates, Trial(steps=1))

    check()


@every_model
def test_late_copies_and_overwritten_memory(pool_of: Pools, like: Any) -> None:
    """Every copy takes a random time; what was let go, what is not reloaded yet and what was reloaded holds NaN."""
    job = tiny_job(like, pipeline=4, microbatches=6)
    replayed = ["input_layernorm", "rotary", "core_attention", "activation"]
    candidates = [
        offloading(plan_for(job, lambda layer: ()), int(0.63 * chunk_bytes(job))),
        offloading(plan_for(job, lambda layer: replayed), chunk_bytes(job), prefetch=2),
    ]
    results = checked(pool_of, job, candidates, Trial(steps=1, tampered=True))
    for stage, outcomes in enumerate(results):
        for outcome in outcomes:
            assert_in_order(outcome)
            assert bool(outcome.planned.copies) == (stage < 3), "the last stage's backwards follow their forwards"
            assert outcome.planned.overwritten >= len(outcome.planned.copies) // 4


def assert_in_order(outcome: Outcome) -> None:
    """On every piece of host memory: out, then back, then the next out; never one into the other."""
    of_memory: dict[int, list[str]] = defaultdict(list)
    for event, host in outcome.planned.copies:
        of_memory[host].append(event)
    for events in of_memory.values():
        assert events == ["out begins", "out ends", "back begins", "back ends"] * (len(events) // 4)


def test_backward_in_a_second_thread(pool_of: Pools) -> None:
    """As on CUDA, where autograd's own threads ask for what was saved."""
    job = tiny_job("gpt", pipeline=2, microbatches=4)
    checked(pool_of, job, [offloading(plan_for(job, lambda layer: ()), chunk_bytes(job))], Trial(backward_thread=True))


def test_copies_leave_behind_a_forward_and_return_before_their_backward(pool_of: Pools) -> None:
    """The plan decides when (rule R1): a way out begins behind its forward; a reload behind the beginning of the forward or backward
    that comes before its own backward."""
    job = tiny_job("gpt", pipeline=4, microbatches=6)
    plan = offloading(plan_for(job, lambda layer: ()), chunk_bytes(job))
    for outcomes in checked(pool_of, job, [plan], Trial(steps=1, traced=True))[:3]:
        events = outcomes[0].planned.events
        for number in range(job.microbatches):
            mine = {kind: spans(events, kind, number) for kind in ("forward", "offload", "reload", "backward")}
            assert mine["forward"][-1]["end_s"] <= mine["offload"][0]["start_s"]
            assert mine["offload"][0]["end_s"] <= mine["reload"][-1]["start_s"]
            if number:
                assert spans(events, "backward", number - 1)[-1]["end_s"] >= mine["reload"][0]["start_s"]
            if number > 1:
                assert spans(events, "backward", number - 2)[-1]["end_s"] <= mine["reload"][0]["start_s"], "not two ahead"


def spans(events: list[dict[str, Any]], kind: str, micro_batch: int) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind and event["micro_batch"] == micro_batch]


def test_memory_does_not_grow(pool_of: Pools) -> None:
    """Fifty steps: host memory is what the plan says from the first one on, and nothing piles up on the device."""
    job = tiny_job("gpt", pipeline=2, microbatches=2, layers=2)
    plan = offloading(plan_for(job, lambda layer: ()), chunk_bytes(job) // 2)
    outcomes = checked(pool_of, job, [plan], Trial(steps=50, training={"optimizer": None}))
    first_stage = outcomes[0][0].planned
    (host_bytes,) = {counts.host_bytes for counts in first_stage.counts}
    assert 0 <= host_bytes - chunk_bytes(job) // 2 < 100 * 256, (
        "one micro-batch on the host at once; blocks begin at multiples of 256"
    )
    assert {counts.offloaded_bytes for counts in first_stage.counts} == {2 * (chunk_bytes(job) // 2)}
    assert max(first_stage.live_bytes[25:]) <= max(first_stage.live_bytes[:25])
