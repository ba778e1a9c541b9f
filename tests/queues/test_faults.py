"""Faults that are put into recorded logs on purpose: each is found, and named."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise

import pytest

from megatron_lynx.testbed.ranks import RankPool
from tests.instruments.queues.differences import differences
from tests.instruments.queues.log import COMPUTE, Collective, Kernel, Log, Mark, Messages, Wait
from tests.instruments.queues.replay import replay
from tests.instruments.queues.unawaited import unawaited
from tests.queues.on_ranks import Setting, recorded
from tests.tiny_jobs import tiny_job

Pools = Callable[[int], RankPool]
QUEUES = pytest.mark.parametrize("queues", [1, 8])


@pytest.fixture(scope="module")
def recorded_logs(pool_of: Pools) -> list[Log]:
    """Without flushes, three stages: the last two make their updates behind as many backwards."""
    job = tiny_job("gpt", pipeline=3, layers=3, microbatches=3)
    return pool_of(3).run(recorded, job, Setting(defers=True, timers=1))


@pytest.fixture
def logs(recorded_logs: list[Log]) -> list[Log]:
    return deepcopy(recorded_logs)


@QUEUES
def test_a_send_that_is_moved_behind_an_update(logs: list[Log], queues: int) -> None:
    """The last gradient before update 0, which the stage before needs for its own."""
    entries = logs[2].entries
    update = entries.index(Mark("update 0"))
    sent = max(place for place in range(update) if isinstance(entries[place], Messages) and not entries[place].receives)
    moved = entries[sent - 1 : sent + 1]  # with the wait for what it sends
    behind = entries.index(Mark("log 0"))
    logs[2].entries = [*entries[: sent - 1], *entries[sent + 1 : behind], *moved, *entries[behind:]]
    outcome = replay(logs, queues)
    assert not outcome.finished
    assert outcome.stuck[1].mark == "batch 0"
    assert any("receive from rank 2" in text for text in outcome.stuck[1].under_way)


@QUEUES
def test_collectives_in_another_order_on_one_rank(logs: list[Log], queues: int) -> None:
    """The first two that are not alike, of communicators to which all ranks belong."""
    entries = logs[1].entries
    places = [
        place for place, entry in enumerate(entries) if isinstance(entry, Collective) and len(entry.communicator.members) == 3
    ]
    one, other = next((a, b) for a, b in pairwise(places) if entries[a] != entries[b])
    entries[one], entries[other] = entries[other], entries[one]
    assert not replay(logs, queues).finished
    assert len(found := differences(logs)) == 2, found
    assert all("rank 1" in text for text in found)


def test_a_wait_that_is_removed(logs: list[Log]) -> None:
    """Of a received output: nothing hangs, but the forward may read what is not there yet."""
    entries = logs[1].entries
    received = next(entry for entry in entries if isinstance(entry, Messages) and entry.receives)
    wait = next(entry for entry in entries if isinstance(entry, Wait) and entry.event.stream == received.stream)
    entries[entries.index(wait)] = Kernel(COMPUTE, "something else")  # so that events behind it stay where they are
    assert replay(logs, 8).finished
    assert unawaited(logs[1]) == [f"rank 1: {received}, number 1"]


@QUEUES
def test_a_barrier_that_one_rank_leaves_out(logs: list[Log], queues: int) -> None:
    barrier = next(entry for entry in logs[0].entries if isinstance(entry, Collective) and entry.what.startswith("barrier"))
    logs[0].entries.remove(barrier)
    assert not replay(logs, queues).finished
    assert differences(logs) != []
