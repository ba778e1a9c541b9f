"""The order of one stage in a step with flushes, without computing those of the others: a rank needs only its own."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.schedule import interleaved, one_f_one_b
from megatron_lynx.schedule.action import Action
from megatron_lynx.schedule.schedule import Phase, phases_of


def passes_of(
    pipeline: int, stage: int, microbatches: int, chunks: int = 1, group_size: int | None = None
) -> Iterator[tuple[Action, Phase]]:
    """Its actions with their phases, as `Schedule.phases` has them. Raises as `interleaved.order` does."""
    if chunks == 1:
        return phases_of(one_f_one_b.order(pipeline, stage, microbatches), one_f_one_b.warmup(pipeline, stage))
    order = interleaved.order(pipeline, stage, microbatches, chunks, group_size)
    return phases_of(order, interleaved.warmup(pipeline, stage, chunks, group_size or pipeline))
