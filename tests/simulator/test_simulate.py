"""Simulated steps: two stages by hand, closed forms, and what holds for any costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.schedule.schedule import Schedule
from megatron_lynx.simulator.passes import HostCopy, TimedPass
from megatron_lynx.simulator.simulate import simulate
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.timeline import Span
from tests.schedule.orders import most_in_flight, read_actions
from tests.schedule.test_orders import schedules
from tests.simulator.by_hand import receiving
from tests.simulator.plain import plain_passes


def overlapping(schedule: Schedule) -> Schedule:
    return Schedule(schedule.orders, schedule.warmups, schedule.chunks, blocking=False)


def placed(simulation: Simulation, stage: int) -> list[tuple[str, float, float]]:
    return [(str(each.action), each.start_s, each.end_s) for each in simulation.executed[stage]]


UNEVEN = [[plain_passes(1.0, 2.0)], [plain_passes(1.5, 2.5)]]


def test_two_stages_that_wait_for_their_messages() -> None:
    """Stage 0's second forward waits for the first one's message, and its first backward for its own send as well."""
    simulation = simulate(with_flushes(2, 2), UNEVEN, p2p_s=0.25)
    assert placed(simulation, 0) == [("0F0", 0.0, 1.0), ("1F0", 1.25, 2.25), ("0B0", 5.5, 7.5), ("1B0", 9.75, 11.75)]
    assert placed(simulation, 1) == [("0F0", 1.25, 2.75), ("0B0", 2.75, 5.25), ("1F0", 5.5, 7.0), ("1B0", 7.0, 9.5)]
    assert simulation.step_s == 11.75
    assert [simulation.bubble_s(stage) for stage in (0, 1)] == [11.75 - 6.0, 11.75 - 8.0]


def test_two_stages_that_overlap_their_messages() -> None:
    simulation = simulate(overlapping(with_flushes(2, 2)), UNEVEN, p2p_s=0.25)
    assert placed(simulation, 0) == [("0F0", 0.0, 1.0), ("1F0", 1.0, 2.0), ("0B0", 5.5, 7.5), ("1B0", 9.5, 11.5)]
    assert placed(simulation, 1) == [("0F0", 1.25, 2.75), ("0B0", 2.75, 5.25), ("1F0", 5.25, 6.75), ("1B0", 6.75, 9.25)]


def test_messages_on_one_link_follow_each_other() -> None:
    """Two forwards of 1 s, messages of 3 s: the second arrives 3 s after the first."""
    order = read_actions("0F0 1F0 0B0 1B0")
    schedule = Schedule((order, order), (1, 1), blocking=False)
    simulation = simulate(schedule, [[plain_passes(1.0, 1.0)]] * 2, p2p_s=3.0)
    assert [start for _, start, _ in placed(simulation, 1)][:2] == [4.0, 7.0]


def test_recomputations_run_while_the_gradient_is_awaited() -> None:
    """1.5 s of recomputation for each micro-batch: the first wait of 2 s hides it, the second, of 1 s, leaves 0.5 s."""
    plain = plain_passes(1.0, 2.0)
    recomputing = receiving(plain, TimedPass(1.5, hidden_s=1.5))
    simulation = simulate(with_flushes(2, 2), [[recomputing], [plain]])
    recomputations = [row for row in placed(simulation, 0) if "R" in row[0]]
    assert recomputations == [("0R0", 2.0, 3.5), ("1R0", 6.0, 7.5)]
    assert simulation.step_s == 9.5
    assert (simulation.total(0, "hidden_s"), simulation.total(0, "exposed_s")) == (2.5, 0.5)
    assert simulation.bubble_s(0) == 9.5 - 6.0 - 0.5


def test_beside_a_message_recomputations_take_longer() -> None:
    """1.5 times: of the first one 2 / 1.5 s are hidden, of the second 1 / 1.5 s; the rest runs alone, as fast as ever."""
    plain = plain_passes(1.0, 2.0)
    recomputing = receiving(plain, TimedPass(1.5, hidden_s=1.5))
    simulation = simulate(with_flushes(2, 2), [[recomputing], [plain]], interference=1.5)
    assert simulation.total(0, "hidden_s") + simulation.total(0, "exposed_s") == pytest.approx(3.0)
    assert simulation.total(0, "exposed_s") == pytest.approx((1.5 - 2.0 / 1.5) + (1.5 - (1.0 - (1.5 - 2.0 / 1.5)) / 1.5))


def test_a_recomputation_that_outlasts_its_receive_is_shown_in_two_parts() -> None:
    plain = plain_passes(1.0, 2.0)
    span = Span("recompute", 0.0, 1.5, window="pipe.recv_backward")
    recomputing = receiving(plain, TimedPass(1.5, hidden_s=1.5, spans=(span,)))
    spans = simulate(with_flushes(2, 2), [[recomputing], [plain]]).timeline().ranks[0]
    assert [(each.window, each.start_s, each.end_s) for each in spans if each.kind == "recompute"] == [
        ("pipe.recv_backward", 2.0, 3.5),
        ("pipe.recv_backward", 6.0, 7.0),
        ("on_demand", 7.0, 7.5),
    ]


def test_memory_of_a_stage_over_time() -> None:
    passes = [[plain_passes(1.0, 2.0, resident_bytes=10)]] * 2
    first = simulate(with_flushes(2, 2), passes).memory(0)
    assert list(zip(first.times_s, first.bytes, strict=True)) == [(0.0, 0), (1.0, 10), (2.0, 20), (6.0, 10), (9.0, 0)]
    assert first.peak_bytes == 20


def offloading(out_s: float, back_s: float) -> Simulation:
    """Two stages, the first of which offloads 8 of its 10 bytes; the last one may, but its backwards follow at once."""
    passes = replace(plain_passes(1.0, 2.0, resident_bytes=10), copy=HostCopy(out_s, back_s, 8))
    return simulate(overlapping(with_flushes(2, 2)), [[passes], [passes]])


def test_copies_that_fit_behind_passes_cost_memory_only_while_they_run() -> None:
    """Out: 1 to 1.5 and 2 to 2.5 s. Back: the first at once, the second while the first backward runs, from 4 s on."""
    simulation = offloading(0.5, 0.5)
    assert simulation.step_s == offloading(0.0, 0.0).step_s == 9.0
    assert [(str(each.action), each.start_s, each.end_s) for each in simulation.copied[0]] == [
        ("0F0", 1.0, 1.5),
        ("0B0", 1.5, 2.0),
        ("1F0", 2.0, 2.5),
        ("1B0", 4.0, 4.5),
    ]
    assert simulation.copied[1] == ()
    curve = simulation.memory(0)
    times, held = (1.0, 1.5, 2.0, 2.5, 4.0, 6.0, 9.0), (10, 10, 20, 12, 20, 10, 0)
    last_of_each_time = dict(zip(curve.times_s, curve.bytes, strict=True))
    assert [last_of_each_time[time] for time in times] == list(held)


def test_copies_longer_than_passes_are_exposed() -> None:
    """Out: 1 to 4 and 4 to 7 s. Back: 4 to 7, for which the first backward waits 3 s; 7 to 10, for the second, 1 s."""
    simulation = offloading(3.0, 3.0)
    assert placed(simulation, 0)[2:] == [("0B0", 7.0, 9.0), ("1B0", 10.0, 12.0)]
    assert simulation.exposed_copy_s(0) == 4.0
    assert simulation.bubble_s(0) == 12.0 - 6.0 - 4.0
    assert simulation.exposed_copy_s(1) == 0.0


@pytest.mark.parametrize("copy_s", [0.25, 3.0])
def test_copies_that_avoid_messages(copy_s: float) -> None:
    """They begin when the exchange behind their forward is over, and the next exchange waits for them: never both at once."""
    p2p_s, microbatches = 0.5, 3
    copy = HostCopy(copy_s, copy_s, 8, avoids_messages=True)
    passes = replace(plain_passes(1.0, 2.0, resident_bytes=10), copy=copy)
    simulation = simulate(with_flushes(2, microbatches), [[passes], [passes]], p2p_s)
    copied = simulation.copied[0]
    assert len(copied) == 2 * microbatches
    exchanged = (
        each for before, each in pairwise(simulation.executed[0]) if (before.action.kind, each.action.kind) != ("B", "F")
    )
    messages = [(each.arrived_s - p2p_s, each.arrived_s) for each in exchanged]
    for each in copied:
        assert not [at for at in messages if each.start_s < at[1] and at[0] < each.end_s], each
    before = next(each.start_s for each in simulation.executed[0] if str(each.action) == "1F0")
    assert (copied[0].start_s, copied[0].end_s) == (before, before + copy_s), "behind the message of its own forward"
    assert (simulation.exposed_copy_s(0) > 0) == (copy_s > 1)


def test_an_exchange_that_synchronises_waits_for_the_copies_before_it() -> None:
    """Megatron's plain 1F1B: with `beside_messages: allow` every copy out was taken for hidden, and all of it is exposed.

    The first stage runs 0F until 1 s, its copy until 1.75 s, and so the exchange; 1F until 2.75 s, its copy until 3.5 s. Copies
    that avoid messages begin behind the exchange, beside the next pass, and nobody waits for them.
    """

    def simulated(**how: bool) -> Simulation:
        passes = replace(plain_passes(1.0, 2.0, resident_bytes=10), copy=HostCopy(0.75, 0.0, 8, **how))
        return simulate(with_flushes(2, 3), [[passes], [passes]])

    beside, avoiding = simulated(), simulated(avoids_messages=True)
    assert placed(beside, 0)[:2] == [("0F0", 0.0, 1.0), ("1F0", 1.75, 2.75)]
    assert beside.exposed_copy_s(0) > 0 == avoiding.exposed_copy_s(0)
    assert avoiding.step_s == simulate(with_flushes(2, 3), [[plain_passes(1.0, 2.0)]] * 2).step_s


def test_orders_that_wait_for_each_other_are_refused() -> None:
    schedule = Schedule((read_actions("0F0 0B0 1F0 1B0"), read_actions("1F0 1B0 0F0 0B0")), (0, 0), blocking=False)
    with pytest.raises(ValueError, match=r"stage 0 waits for .*kind='B', micro_batch=0.*; stage 1 waits for"):
        simulate(schedule, UNEVEN)


@given(st.integers(1, 8), st.integers(1, 24), st.integers(1, 9), st.integers(1, 9))
def test_even_stages_without_communication(pipeline: int, microbatches: int, forward_s: int, backward_s: int) -> None:
    simulation = simulate(with_flushes(pipeline, microbatches), [[plain_passes(forward_s, backward_s)]] * pipeline)
    assert simulation.step_s == (microbatches + pipeline - 1) * (forward_s + backward_s)
    for stage in range(pipeline):
        assert simulation.bubble_s(stage) == (pipeline - 1) * (forward_s + backward_s)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4), st.integers(1, 9), st.integers(1, 9))
def test_interleaving_divides_the_bubble_by_the_chunks(
    pipeline: int, groups: int, chunks: int, forward_s: int, backward_s: int
) -> None:
    """`forward_s` and `backward_s` of one chunk: the bubble is (p - 1) of those instead of (p - 1) whole stages."""
    passes = [[plain_passes(forward_s, backward_s)] * chunks] * pipeline
    simulation = simulate(with_flushes(pipeline, groups * pipeline, chunks), passes)
    assert simulation.bubble_s(0) == (pipeline - 1) * (forward_s + backward_s)


seconds = st.integers(1, 40).map(lambda quarters: quarters / 4)


@given(schedules, st.data())
def test_any_step(schedule: Schedule, data: st.DataObject) -> None:
    """No stage does two things at once; nothing runs before what it needs; no step is shorter than a stage's work or than
    one micro-batch's way through all stages and back."""
    costs = [[(data.draw(seconds), data.draw(seconds)) for _ in range(schedule.chunks)] for _ in schedule.orders]
    p2p_s = data.draw(seconds)
    passes = [[plain_passes(*cost, resident_bytes=1) for cost in stage] for stage in costs]
    simulation = simulate(schedule, passes, p2p_s)
    ends = {
        (each.action.kind, each.action.micro_batch, each.action.chunk * schedule.pipeline + stage): each.end_s
        for stage, executed in enumerate(simulation.executed)
        for each in executed
    }
    for stage, executed in enumerate(simulation.executed):
        assert tuple(each.action for each in executed) == schedule.orders[stage]
        assert all(before.end_s <= after.start_s for before, after in pairwise(executed))
        for each in executed:
            place = each.action.chunk * schedule.pipeline + stage
            source = place - 1 if each.action.kind == "F" else place + 1
            needed = ends.get((each.action.kind, each.action.micro_batch, source))
            assert needed is None or each.start_s >= needed + p2p_s
        assert simulation.step_s >= simulation.busy_s(stage) == pytest.approx(sum(each.end_s - each.start_s for each in executed))
        assert simulation.memory(stage).peak_bytes == most_in_flight(schedule.orders[stage])
        assert simulation.memory(stage).bytes[-1] == 0
    virtual_stages = schedule.pipeline * schedule.chunks
    copy = HostCopy(data.draw(seconds), data.draw(seconds), 1)
    offloaded = simulate(schedule, [[replace(chunk, copy=copy) for chunk in stage] for stage in passes], p2p_s)
    assert offloaded.step_s >= simulation.step_s - 1e-9
    for stage in range(schedule.pipeline):
        assert offloaded.memory(stage).bytes[-1] == 0
        assert offloaded.memory(stage).peak_bytes <= most_in_flight(schedule.orders[stage])
    way = sum(forward_s + backward_s for stage in costs for forward_s, backward_s in stage) + 2 * (virtual_stages - 1) * p2p_s
    assert simulation.step_s >= way - 1e-9
