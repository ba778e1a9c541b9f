"""The replayer on logs written by hand: what finishes, what hangs and why, with one hardware queue and with eight."""

from __future__ import annotations

import pytest

from tests.instruments.queues.differences import differences
from tests.instruments.queues.hidden import hides
from tests.instruments.queues.log import COMPUTE, Communicator, Log, Message
from tests.instruments.queues.replay import replay

QUEUES = (1, 8)
WORLD = Communicator("world", (0, 1))
PAIR = Communicator("pp", (0, 1))
OTHER_PAIR = Communicator("pp, the other way", (0, 1))


def two() -> tuple[Log, Log]:
    return Log(0), Log(1)


@pytest.mark.parametrize("queues", QUEUES)
def test_a_message_arrives(queues: int) -> None:
    one, other = logs = two()
    one.kernel("forward")
    one.message("send", 1, PAIR)
    other.wait(other.message("receive", 0, PAIR))
    other.kernel("forward")
    for log in logs:
        log.synchronize()
    outcome = replay(logs, queues)
    assert outcome.finished
    assert outcome.ran == (("forward",), ("forward",))
    assert str(outcome) == f"Finished with {queues} hardware queue{'s' if queues > 1 else ''}"


@pytest.mark.parametrize("queues", QUEUES)
def test_a_message_that_is_matched_behind_a_barrier_hangs_whoever_synchronizes_before(queues: int) -> None:
    """As double-buffered stages did behind Megatron's timers."""
    one, other = logs = two()
    for log in logs:
        log.barrier(WORLD)
        log.mark("update 0")
    other.message("receive", 0, PAIR)
    other.synchronize()
    one.barrier(WORLD)
    other.barrier(WORLD)
    one.message("send", 1, PAIR)
    outcome = replay(logs, queues)
    assert not outcome.finished
    assert [stuck.host for stuck in outcome.stuck] == [
        "the host waits in barrier for world of 0, 1",
        "the host makes the communicator pp of 0, 1, and waits for rank 0",
    ]
    assert outcome.stuck[1].mark == "update 0"


@pytest.mark.parametrize("queues", QUEUES)
def test_the_same_where_the_communicator_is_there(queues: int) -> None:
    one, other = logs = two()
    one.message("send", 1, PAIR)
    other.message("receive", 0, PAIR)
    other.message("receive", 0, PAIR)
    other.synchronize()
    one.barrier(WORLD)
    other.barrier(WORLD)
    one.message("send", 1, PAIR)
    stuck = replay(logs, queues).stuck
    assert stuck[1].host == "the host waits in torch.cuda.synchronize for pp of 0, 1"
    assert stuck[1].under_way == ("receive from rank 0 on pp of 0, 1",)
    assert stuck[0].host == "the host makes the communicator world of 0, 1, and waits for rank 1"


def behind_a_receive(back: Communicator) -> tuple[Log, Log]:
    """Rank 1 waits for a message that rank 0 sends behind a sum; in between rank 1 sends on `back`, which rank 0 takes last."""
    one, other = logs = two()
    for log in logs:  # the communicators are there
        direction = "send" if log.rank == 0 else "receive"
        for communicator in dict.fromkeys((PAIR, back)):
            log.message(direction, 1 - log.rank, communicator)
    other.message("receive", 0, PAIR)
    other.message("send", 0, back)
    one.wait(one.collective("norm", WORLD))
    one.message("send", 1, PAIR)
    one.message("receive", 1, back)
    other.wait(other.collective("norm", WORLD))
    return logs


def test_one_queue_is_held_up_by_a_send_behind_a_receive_of_its_own_stream() -> None:
    """A receive under way holds up nothing but its own stream. The send behind it is the head of the only queue."""
    logs = behind_a_receive(PAIR)
    assert replay(logs, 8).finished
    outcome = replay(logs, 1)
    assert not outcome.finished
    assert outcome.stuck[1].under_way == ("receive from rank 0 on pp of 0, 1",)
    assert outcome.stuck[1].heads == (
        "queue 0: send to rank 0 on pp of 0, 1, behind receive from rank 0 on pp of 0, 1; it holds up 1 behind it",
    )
    assert str(outcome).startswith("Deadlock with 1 hardware queue\n  rank 0:")


def test_directions_with_communicators_of_their_own_do_not_hold_up_each_other() -> None:
    assert replay(behind_a_receive(OTHER_PAIR), 1).finished


def test_compute_that_waits_holds_up_other_streams_of_its_queue() -> None:
    """The event is reached by a message that rank 0 sends behind a collective, which is behind the wait in rank 1's queue."""
    one, other = logs = two()
    received = other.message("receive", 0, PAIR)
    other.wait(received)
    summed = other.collective("sum", WORLD, stream="side")
    other.wait(summed)
    one.message("send", 1, PAIR, stream="side")
    one.collective("sum", WORLD)
    assert replay(logs, 1).finished
    late = two()
    late[0].message("send", 1, OTHER_PAIR)
    late[1].message("receive", 0, OTHER_PAIR)
    late[1].kernel("forward", "side")
    late[1].wait(late[1].message("receive", 0, PAIR))
    late[1].collective("sum", WORLD, stream="side")
    late[0].wait(late[0].collective("sum", WORLD))
    late[0].message("send", 1, PAIR)
    assert not replay(late, 1).finished


@pytest.mark.parametrize("queues", QUEUES)
def test_messages_posted_together_need_no_order(queues: int) -> None:
    logs = two()
    for log in logs:
        other = 1 - log.rank
        log.wait(log.messages([Message("send", other), Message("receive", other)], PAIR))
        log.synchronize()
    assert replay(logs, queues).finished


@pytest.mark.parametrize("queues", QUEUES)
def test_messages_posted_alone_do(queues: int) -> None:
    logs = two()
    for log in logs:
        other = 1 - log.rank
        log.message("send", other, PAIR)
        log.message("receive", other, PAIR)
    outcome = replay(logs, queues)
    assert not outcome.finished
    assert [stuck.under_way for stuck in outcome.stuck] == [
        ("send to rank 1 on pp of 0, 1",),
        ("send to rank 0 on pp of 0, 1",),
    ]


@pytest.mark.parametrize("queues", QUEUES)
def test_collectives_in_another_order_on_one_rank(queues: int) -> None:
    """On one communicator they never meet; on two they wait for each other, as compute waits for each."""
    logs = two()
    for log, names in zip(logs, (("a", "b"), ("b", "a")), strict=True):
        for name in names:
            log.wait(log.collective(name, WORLD))
    assert not replay(logs, queues).finished
    assert differences(logs) == ["collective 0 of both ranks 0 and 1: rank 0 has a on world of 0, 1, rank 1 b on world of 0, 1"]
    logs = two()
    for log, communicators in zip(logs, ((WORLD, PAIR), (PAIR, WORLD)), strict=True):
        for communicator in communicators:
            log.wait(log.collective("a", communicator))
    assert not replay(logs, queues).finished
    assert len(differences(logs)) == 1


def test_messages_of_different_sizes_do_not_fit() -> None:
    one, other = logs = two()
    one.message("send", 1, PAIR, elements=8)
    other.message("receive", 0, PAIR, elements=4)
    one.message("send", 1, OTHER_PAIR)
    assert not replay(logs, 8).finished
    assert differences(logs) == [
        "message 0 from rank 0 to 1 on pp of 0, 1: 8 elements sent, 4 elements expected",
        "message 0 from rank 0 to 1 on pp, the other way of 0, 1: 1 elements sent, nothing expected",
    ]


def test_equal_logs_do_not_differ() -> None:
    logs = two()
    for log in logs:
        log.barrier(WORLD)
        log.message("send" if log.rank == 0 else "receive", 1 - log.rank, PAIR)
    assert differences(logs) == []


@pytest.mark.parametrize(("queues", "hidden"), [(1, False), (8, True)])
def test_what_runs_while_its_message_is_not_made_is_hidden(queues: int, hidden: bool) -> None:
    """A replay between a send of the same stream and the wait for the receive, as in interleaved schedules."""
    one, other = logs = two()
    other.kernel("forward")
    received = other.message("receive", 0, PAIR)
    other.message("send", 0, PAIR)
    other.kernel("replay")
    other.wait(received)
    other.kernel("backward")
    one.kernel("backward")
    one.message("send", 1, PAIR)
    one.message("receive", 1, PAIR)
    assert replay(logs, queues).finished
    assert hides(logs, queues, 1, "replay") is hidden


def test_kernels_in_a_row_are_one() -> None:
    log = Log(0)
    assert log.kernel("forward") == log.kernel("forward")
    log.kernel("backward")
    assert log.event(COMPUTE).things == 2
    assert replay([log], 1).ran == (("forward", "backward"),)


def test_a_stream_does_not_wait_for_itself() -> None:
    log = Log(0)
    log.wait(log.kernel("forward"))
    assert len(log.entries) == 1
