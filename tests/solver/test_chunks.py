"""The chunks of a stage share its budget: what one of them keeps, the others cannot."""

from __future__ import annotations

from itertools import pairwise

from megatron_lynx.config.job import Budget
from megatron_lynx.cost.budget import layers_budget_bytes
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.solver.stages import Stages
from tests.config.jobs import catalogued_job

LAYOUT = {"tensor": 1, "pipeline": 8, "layers_per_chunk": 3, "distributed_optimizer": True}


def last_stage(memory_gib: float):
    """Of 8 with two chunks each: 8 micro-batches of the first one are in flight, and one of the model's last."""
    job = catalogued_job("gpt-22b", "a100-80g", gpus=32, batch=64, parallel=LAYOUT, policy="planned")
    stages = Stages(job.model_copy(update={"budget": Budget(memory_gib=memory_gib)}), analytic_profile(job))
    return stages.answer(7)


def exposed_s(answer) -> float:
    return sum(chunk.exposed_s for chunk in answer.chunks)


def test_chunks_in_flight_leave_the_last_one_room_where_that_exposes_less() -> None:
    """With 55.4 GiB they once kept more than with 53.2, and the last chunk had to recompute: 8.2 ms were exposed, before 4.9."""
    less, more = last_stage(53.2), last_stage(55.4)
    assert exposed_s(more) <= exposed_s(less)
    assert more.chunks[-1].exposed_s == 0


def test_more_memory_never_exposes_more_on_a_stage_with_chunks() -> None:
    seconds = [exposed_s(last_stage(memory_gib)) for memory_gib in (45, 48, 51, 54, 57, 60, 63, 66)]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(seconds))


def test_all_chunks_together_keep_the_budget() -> None:
    """The model's last chunk gets what the others leave. It once could have been given all: 58.75 GiB at a budget of 57."""
    job = catalogued_job("gpt-22b", "a100-80g", gpus=32, batch=64, parallel=LAYOUT, policy="planned")
    for memory_gib in (45, 51, 57):
        bound = layers_budget_bytes(job.model_copy(update={"budget": Budget(memory_gib=memory_gib)}), 7)
        assert bound is not None
        assert last_stage(memory_gib).peak_bytes <= bound, f"{memory_gib} GiB"
