"""How many chunks a stage holds between their forward and their backward, at most.

1F1B, p = 4          stage 0 1 2 3            p - s
chunks in flight           4 3 2 1
without flushes            4 3 2 1            p - s, all the time
interleaved, v = 2   stage 0 1 2 3            2(p - 1 - s) + (v - 1)g + 1      g: micro-batches of a group, usually p
chunks in flight          11 9 7 5            on stage 0, g = p: vp + p - 1
"""

from __future__ import annotations

from megatron_lynx.config.job import Job


def chunks_in_flight(job: Job, stage: int) -> int:
    """How many one stage holds; each is one chunk of one micro-batch."""
    return _in_flight(job.parallel.pipeline, job.chunks, job.microbatches, job.microbatch_group, stage)


def chunks_in_flight_by_stage(job: Job) -> list[int]:
    """How many each stage holds."""
    pipeline, chunks, microbatches, group = job.parallel.pipeline, job.chunks, job.microbatches, job.microbatch_group
    return [_in_flight(pipeline, chunks, microbatches, group, stage) for stage in range(pipeline)]


def _in_flight(pipeline: int, chunks: int, microbatches: int, group: int, stage: int) -> int:
    if chunks == 1:
        return min(pipeline - stage, microbatches)
    return min(microbatches * chunks, 2 * (pipeline - 1 - stage) + (chunks - 1) * group + 1)


def microbatches_in_flight(job: Job, stage: int) -> int:
    """How many micro-batches of a stage's first chunk, whose backward comes last, it holds."""
    pipeline = job.parallel.pipeline
    return min(job.microbatches, pipeline - stage if job.chunks == 1 else job.microbatch_group)
