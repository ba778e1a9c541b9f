"""The planner's count of what is on the host is the runtime's."""

from __future__ import annotations

import pytest

from megatron_lynx.runtime import offload
from megatron_lynx.runtime.turns import Turn, Turns
from megatron_lynx.schedule.host_pool import sets_on_host
from megatron_lynx.schedule.interleaved import interleaved
from megatron_lynx.schedule.one_f_one_b import one_f_one_b


@pytest.mark.parametrize(
    ("pipeline", "microbatches", "chunks", "group"),
    [(1, 4, 1, None), (2, 4, 1, None), (8, 32, 1, None), (8, 3, 1, None), (2, 4, 2, None), (4, 8, 3, None), (2, 7, 2, 5)],
)
@pytest.mark.parametrize("prefetch", [1, 2])
def test_sets_of_the_pool(pipeline: int, microbatches: int, chunks: int, group: int | None, prefetch: int) -> None:
    schedule = one_f_one_b(pipeline, microbatches) if chunks == 1 else interleaved(pipeline, microbatches, chunks, group)
    for stage in range(pipeline):
        turns = Turns([Turn(a.kind, a.micro_batch, a.chunk, phase) for a, phase in schedule.phases(stage)])  # type: ignore[arg-type]
        expected = tuple(offload.sets_on_host(turns, chunk, prefetch) for chunk in range(chunks))
        assert sets_on_host(pipeline, stage, microbatches, chunks, group, prefetch) == expected


def test_stages_of_1f1b() -> None:
    assert [sets_on_host(8, stage, 32) for stage in range(8)] == [(7 - stage,) for stage in range(8)]
