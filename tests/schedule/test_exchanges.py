"""Exchanges that overlap passes (interleaved schedules): what `docs/offloading.md` says about copies that would avoid them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_lynx.schedule.flushes import warmup
from megatron_lynx.testbed.ranks import RankPool
from tests.schedule.exchanges import Event, Operation, noted, run_through

Pools = Callable[[int], RankPool]
SHAPES = [(2, 2, 4, 2), (2, 3, 8, 3), (4, 2, 8, 4), (4, 3, 9, 5), (6, 2, 18, 6)]
"""(stages, chunks, micro-batches, group)."""


@pytest.mark.parametrize("shape", SHAPES)
def test_wherever_a_steady_stage_waits_another_exchange_is_under_way(pool_of: Pools, shape: tuple[int, int, int, int]) -> None:
    (notes,) = pool_of(1).run(noted, *shape)
    pipeline, chunks, microbatches, group = shape
    for stage, events in enumerate(notes):
        ahead = warmup(pipeline, stage, chunks, group)
        passes = [at for at, event in enumerate(events) if event.kind == "pass"]
        inside = passes[ahead + 1 : 2 * microbatches * chunks - ahead - 2]
        assert all(under_way(events[:at]) for at in inside), f"stage {stage}"


def under_way(events: list[Event]) -> set[tuple[int, Operation]]:
    """What was posted and not waited for."""
    posted = {(event.exchange, name) for event in events if event.kind == "post" for name in event.operations}
    return posted - {(event.exchange, name) for event in events if event.kind == "wait" for name in event.operations}


@pytest.mark.parametrize("shape", SHAPES)
def test_no_ring_closes_where_an_exchange_waits_for_the_one_before_it(pool_of: Pools, shape: tuple[int, int, int, int]) -> None:
    """Which is what strict turns would make of them."""
    (notes,) = pool_of(1).run(noted, *shape)
    assert run_through(notes, in_turns=False)
    assert run_through(notes, in_turns=True)
    assert not run_through([events[1:] if stage == 1 else events for stage, events in enumerate(notes)], in_turns=False)
