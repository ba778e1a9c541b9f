"""1F1B (PipeDream-Flush), as Megatron runs it without interleaving.

    stage s of p, m micro-batches, w = min(p - 1 - s, m)

    w forwards | m - w times a forward and the oldest backward | the last w backwards

At most w + 1 = p - s micro-batches (or all m) are in flight on a stage.
"""

from __future__ import annotations

from megatron_lynx.schedule.schedule import Action, Schedule, paired


def warmup(pipeline: int, stage: int) -> int:
    """Return the forwards of a stage before its first backward, given enough micro-batches."""
    return pipeline - 1 - stage


def order(pipeline: int, stage: int, microbatches: int, more: int = 0) -> tuple[Action, ...]:
    """Return the passes of one stage in one step. `more`: additional forwards before the first backward."""
    forwards = [Action(index, "F") for index in range(microbatches)]
    backwards = [Action(index, "B") for index in range(microbatches)]
    return paired(forwards, backwards, warmup(pipeline, stage) + more)


def one_f_one_b(pipeline: int, microbatches: int, more: int = 0) -> Schedule:
    """Return the orders of all stages. `more`: as in `order`."""
    stages = range(pipeline)
    return Schedule(
        orders=tuple(order(pipeline, stage, microbatches, more) for stage in stages),
        warmups=tuple(warmup(pipeline, stage) + more for stage in stages),
    )
