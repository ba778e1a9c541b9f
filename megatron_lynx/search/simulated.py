"""Simulates a step under a stock policy."""

from __future__ import annotations

from megatron_lynx.config.job import Job
from megatron_lynx.cost.ends import ends_of
from megatron_lynx.cost.host import issued
from megatron_lynx.cost.step import recomputing_stage_s
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.simulator.double_buffered import simulate_without_flushes
from megatron_lynx.simulator.passes import ChunkPasses, plain_passes
from megatron_lynx.simulator.simulate import simulate
from megatron_lynx.simulator.simulation import Simulation, in_steady_state


def pipeline_s(job: Job, profile: Profile) -> float:
    """Seconds of forwards and backwards of a whole step, without gradients and optimizer."""
    pipeline = job.parallel.pipeline
    chunks = [_chunks(job, profile, stage) for stage in range(pipeline)]
    message_s = profile.link_s("p2p", LayerShape.of(job).input_bytes) if pipeline > 1 else 0.0
    group = max(pipeline, job.microbatch_group)
    return in_steady_state(group, job.microbatches, lambda few: _simulated(job, chunks, few, message_s)).step_s


def _simulated(job: Job, chunks: list[list[ChunkPasses]], microbatches: int, message_s: float) -> Simulation:
    pipeline = job.parallel.pipeline
    if job.schedule == "double_buffered":
        alone = [passes for (passes,) in chunks]
        return simulate_without_flushes(microbatches, alone, message_s, deferred=job.defer_updates)
    schedule = with_flushes(pipeline, microbatches, job.chunks, job.microbatch_group)
    return simulate(schedule, chunks, message_s, between_passes=not job.overlap.messages)


def _chunks(job: Job, profile: Profile, stage: int) -> list[ChunkPasses]:
    """The first chunk of the first stage has the embedding, the last one of the last stage the head."""
    message_bytes = LayerShape.of(job).gathered_bytes
    whole = issued(recomputing_stage_s(job, profile, stage), job, profile, stage)
    ends = {"first": stage == 0, "last": stage == job.parallel.pipeline - 1}
    first, last = ends_of(profile, message_bytes, **ends, pieces=job.head_pieces)
    forward_s = (whole.forward_s - first.forward_s - last.forward_s) / job.chunks
    backward_s = (whole.backward_s - first.backward_s - last.backward_s) / job.chunks
    forwards, backwards = [forward_s] * job.chunks, [backward_s] * job.chunks
    forwards[0], backwards[0] = forwards[0] + first.forward_s, backwards[0] + first.backward_s
    forwards[-1], backwards[-1] = forwards[-1] + last.forward_s, backwards[-1] + last.backward_s
    return [plain_passes(*seconds) for seconds in zip(forwards, backwards, strict=True)]
