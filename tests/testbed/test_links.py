"""Links between emulated hosts: what crosses it, in which order, how long it takes, and that it needs no privilege."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from megatron_lynx.testbed import links
from megatron_lynx.testbed.links import LATENCY_S, Link, Links, bytes_moved
from megatron_lynx.testbed.ranks import RankPool
from tests.hurry import skip_in_a_hurry
from tests.nursery import process as nursery
from tests.tiny_jobs import tiny_job

from . import links_on_ranks, on_ranks

MBIT = 8.0
"""A megabyte takes a second."""
WHOLE = torch.zeros(250_000)


class Clock:
    """Seconds that pass when the test says so."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)
    return clock


def test_a_transfer_begins_when_its_last_member_has_posted_it_and_takes_its_bytes(clock: Clock) -> None:
    """An all-reduce over two ranks sends its size once in each direction."""

    def last_member_posts() -> None:
        clock.now_s += 0.5

    assert Link(MBIT).carry(last_member_posts, "allreduce", ([WHOLE],), 2).result() == pytest.approx(101.5 + LATENCY_S)


def test_transfers_of_a_rank_follow_each_other_over_its_link(clock: Clock) -> None:
    link = Link(MBIT)
    arrivals = [link.carry(posted, "allreduce", ([WHOLE],), 2).result() - LATENCY_S for _ in range(3)]
    assert arrivals == pytest.approx([101, 102, 103])
    clock.now_s += 20
    assert link.carry(posted, "allreduce", ([WHOLE],), 2).result() - LATENCY_S == pytest.approx(121)


def test_directions_of_the_link_are_apart(clock: Clock) -> None:
    """Two messages one way, a shorter one the other way; a collective waits for both."""
    link = Link(MBIT)
    moved = [("send", ([WHOLE], 1, 0)), ("send", ([WHOLE], 1, 0)), ("recv", ([WHOLE[:25_000]], 1, 0)), ("allreduce", ([WHOLE],))]
    arrivals = [link.carry(posted, operation, args, 2).result() - LATENCY_S for operation, args in moved]
    assert arrivals == pytest.approx([101, 102, 100.1, 103])


def test_a_receive_that_is_posted_first_keeps_nobody_waiting(clock: Clock) -> None:
    link, sent = Link(MBIT), threading.Event()
    coming = link.carry(sent.wait, "recv", ([WHOLE], 1, 0), 2)
    assert link.carry(posted, "barrier", (), 2).result() == pytest.approx(100 + LATENCY_S)
    sent.set()
    assert coming.result() == pytest.approx(101 + LATENCY_S)


def posted() -> None:
    """All members have, at once."""


PART, PARTS = WHOLE[:62_500], [WHOLE[:62_500]] * 4


@pytest.mark.parametrize(
    ("operation", "args", "of_two", "of_four"),
    [
        ("allreduce_coalesced", ([WHOLE],), 1.0, 1.5),
        ("all_gather_single", (WHOLE, PART), 0.25, 0.75),
        ("allgather", ([PARTS], [PART]), 0.25, 0.75),
        ("reduce_scatter_single", (PART, WHOLE), 0.25, 0.75),
        ("all_to_all_single", (PART, WHOLE), 0.5, 0.75),
        ("broadcast", ([WHOLE],), 1.0, 1.0),
        ("gather", ([PARTS], [PART]), 0.25, 0.25),
    ],
)
def test_bytes_that_cross_a_ranks_link(operation: str, args: Any, of_two: float, of_four: float) -> None:
    """In megabytes each way, of a whole of one."""
    for ranks, megabytes in ((2, of_two), (4, of_four)):
        assert bytes_moved(operation, args, ranks) == {"out": megabytes * 1e6, "in": megabytes * 1e6}


def test_no_operation_is_over_before_its_bytes_have_crossed() -> None:
    """On real ranks, whether the caller waits at once or later. Lower bounds hold on any machine."""
    with RankPool(2, links=Links(200)) as ranks:
        for rank, measured in enumerate(ranks.run(links_on_ranks.seconds_of_operations)):
            for (operation, blocking), (took_s, megabytes) in measured.items():
                assert took_s >= megabytes * 8 / 200, (rank, operation, blocking)
            assert len(measured) == 14


def test_who_waits_for_the_link_sleeps() -> None:
    """A core that waits is free: half a second of waiting takes next to no processor time."""
    with RankPool(2, links=Links(16)) as ranks:
        assert max(ranks.run(links_on_ranks.processor_s_of_a_wait)) < 0.25


def test_bits_are_those_without_a_link(pool_of: Any) -> None:
    job = tiny_job("gpt", tensor=2, pipeline=2, microbatches=2, sequence_parallel=True)
    with RankPool(4, links=Links(2000)) as ranks:
        shaped = ranks.run(on_ranks.train, job, [{}])
    assert all(
        one.equals(other)
        for a, b in zip(shaped, pool_of(4).run(on_ranks.train, job, [{}]), strict=True)
        for one, other in zip(a, b, strict=True)
    )


def test_an_ordinary_user_has_the_link_that_root_has() -> None:
    """Story: network namespaces and `tc` shaped the link, which takes root. Others got loopback, 1.17 of stock none for 0.98."""
    skip_in_a_hurry()
    ended = nursery.run("tests.testbed.ordinary_user")
    assert ended.returncode == 0, ended.stderr
    assert all(float(seconds) >= 0.1 for seconds in ended.stdout.split()), ended.stdout


def test_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="found 0"):
        Links(0)
