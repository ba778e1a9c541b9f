"""The link between emulated hosts: what crosses it, in which order, how long it takes, and that it needs no privilege."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lynx.testbed import links
from megatron_lynx.testbed.links import LATENCY_S, Link, Links, bytes_sent
from megatron_lynx.testbed.ranks import RankPool
from tests.tiny_jobs import tiny_job

from . import links_on_ranks, on_ranks

MBIT = 8.0
"""A megabyte takes a second."""
WHOLE = torch.zeros(250_000)


class Clock:
    """Seconds that pass while somebody sleeps."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)
    monkeypatch.setattr(links.dist, "get_process_group_ranks", lambda group: group.ranks)
    return clock


@pytest.fixture
def ends(clock: Clock) -> Any:
    """The link as four ranks see it."""
    with Links(MBIT) as network:
        yield [Link(network.environment(rank)["LYNX_LINK"], rank) for rank in range(4)]


def group(*ranks: int) -> Any:
    return SimpleNamespace(ranks=list(ranks), group_name=str(ranks))


def over_s(clock: Clock, crosses: Any) -> float:
    """When a transfer is over for one who waits from now on."""
    before_s = clock.now_s
    crosses()
    after_s, clock.now_s = clock.now_s, before_s
    return after_s


def test_a_collective_begins_with_its_last_member_and_takes_its_bytes(clock: Clock, ends: Any) -> None:
    """An all-reduce over two ranks sends its size once in each direction. Both ranks wait until the same moment."""
    early = ends[0].post("allreduce", group(0, 1), ([WHOLE],))
    clock.now_s += 0.5
    late = ends[1].post("allreduce", group(0, 1), ([WHOLE],))
    assert over_s(clock, early) == over_s(clock, late) == pytest.approx(101.5 + LATENCY_S)
    clock.now_s += 20
    assert over_s(clock, early) == 120.5, "long over: there is nothing to wait for"


def test_collectives_of_all_groups_follow_each_other_over_the_one_link(clock: Clock, ends: Any) -> None:
    found = []
    for pair in ((0, 1), (2, 3)):
        for _ in range(2):
            crosses = [ends[rank].post("allreduce", group(*pair), ([WHOLE],)) for rank in pair]
            found.append([over_s(clock, each) - LATENCY_S for each in crosses])
    assert found == [pytest.approx([each, each]) for each in (101, 102, 103, 104)]


def test_directions_of_the_link_are_apart(clock: Clock, ends: Any) -> None:
    """Two messages one way, a shorter one the other way; a receive that is posted first waits for its sender."""
    there = [ends[1].post("recv", group(0, 1), ([WHOLE], 0, 0)) for _ in range(2)]
    clock.now_s += 1
    there += [ends[0].post("send", group(0, 1), ([WHOLE], 1, 0)) for _ in range(2)]
    back = [ends[1].post("send", group(0, 1), ([WHOLE[:25_000]], 0, 0)), ends[0].post("recv", group(0, 1), ([WHOLE], 1, 0))]
    assert [over_s(clock, each) - LATENCY_S for each in there] == pytest.approx([102, 103, 102, 103])
    assert [over_s(clock, each) - LATENCY_S for each in back] == pytest.approx([101.1, 101.1])


def test_ranks_of_one_host_do_not_use_the_link(clock: Clock, ends: Any) -> None:
    crosses = [ends[rank].post("allreduce", group(1, 3), ([WHOLE],)) for rank in (1, 3)]
    assert [over_s(clock, each) for each in crosses] == [100, 100]


def test_more_transfers_in_flight_than_there_is_room_for_are_refused(clock: Clock, ends: Any) -> None:
    for _ in range(links.MOST_TRANSFERS):
        ends[0].post("barrier", group(0, 1), ())
    with pytest.raises(RuntimeError, match="1024 transfers are in flight"):
        ends[0].post("barrier", group(0, 1), ())


PART, PARTS = WHOLE[:62_500], [WHOLE[:62_500]] * 4


@pytest.mark.parametrize(
    ("operation", "args", "of_two", "of_four"),
    [
        ("allreduce_coalesced", ([WHOLE],), 1.0, 1.5),
        ("all_gather_single", (WHOLE, PART), 0.25, 0.75),
        ("allgather", ([PARTS], [PART]), 0.25, 0.75),
        ("reduce_scatter_single", (PART, WHOLE), 0.25, 0.75),
        ("all_to_all_single", (PART, WHOLE), 0.5, 0.5),
        ("broadcast", ([WHOLE],), 1.0, 1.0),
        ("gather", ([PARTS], [PART]), 0.25, 0.25),
        ("barrier", (), 0, 0),
    ],
)
def test_bytes_that_a_rank_sends_to_the_other_host(operation: str, args: Any, of_two: float, of_four: float) -> None:
    """In megabytes, of a whole of one. Of four ranks on two hosts two are on the other one."""
    assert bytes_sent(operation, args, [0, 1], 1) == of_two * 1e6
    assert bytes_sent(operation, args, [0, 1, 2, 3], 2) == of_four * 1e6


def test_no_operation_is_over_before_its_bytes_have_crossed() -> None:
    """On real ranks, whether the caller waits at once or later. Lower bounds hold on any machine."""
    with Links(200) as network, RankPool(2, links=network) as ranks:
        for rank, measured in enumerate(ranks.run(links_on_ranks.seconds_of_operations)):
            for (operation, blocking), (took_s, megabytes) in measured.items():
                assert took_s >= megabytes * 8 / 200, (rank, operation, blocking)
            assert len(measured) == 14


def test_who_waits_for_the_link_sleeps() -> None:
    """A core that waits is free: half a second of waiting takes next to no processor time."""
    with Links(16) as network, RankPool(2, links=network) as ranks:
        assert max(ranks.run(links_on_ranks.processor_s_of_a_wait)) < 0.25


def test_bits_are_those_without_a_link(pool_of: Any) -> None:
    job = tiny_job("gpt", tensor=2, pipeline=2, microbatches=2, sequence_parallel=True)
    with Links(2000) as network, RankPool(4, links=network) as ranks:
        shaped = ranks.run(on_ranks.train, job, [{}])
    assert all(
        one.equals(other)
        for a, b in zip(shaped, pool_of(4).run(on_ranks.train, job, [{}]), strict=True)
        for one, other in zip(a, b, strict=True)
    )


@pytest.mark.slow
def test_an_ordinary_user_has_the_link_that_root_has() -> None:
    """Story: network namespaces and `tc` shaped the link, which takes root. Others got loopback, 1.17 of stock none for 0.98."""
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    if drop and shutil.which(drop[0]) is None:
        pytest.skip("no setpriv, with which root becomes an ordinary user")
    script = (
        "from megatron_lynx.testbed.links import Links\n"
        "from megatron_lynx.testbed.ranks import run_ranks\n"
        "from tests.testbed.links_on_ranks import unprivileged_all_reduce_s\n"
        "with Links(20) as network: print(*run_ranks(unprivileged_all_reduce_s, 2, 250_000, links=network))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([*drop, sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert all(float(seconds) >= 0.1 for seconds in ended.stdout.split()), ended.stdout


def test_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="found 0"):
        Links(0)
