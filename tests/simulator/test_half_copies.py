"""Copies within a micro-batch, by hand: two seconds forward and four backward for each of four halves."""

from __future__ import annotations

from dataclasses import replace

from megatron_lynx.anatomy import DENSE, HALVES
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import PricedSection
from megatron_lynx.pace import Turns
from megatron_lynx.simulator.passes import TimedPass
from megatron_lynx.simulator.walk import Leaving, Treated, Walk
from megatron_lynx.timeline import Span, curve_of_parts
from megatron_lynx.timetable import Pass, PlannedHalf

KEPT = [Treated(PlannedHalf(layer, DENSE[half]), PricedSection(HalfMemory(100, 0, 100))) for layer in (1, 2) for half in HALVES]


def leaving(seconds: float, *turns: tuple[int, int]) -> list[Treated]:
    """The first halves leave, 60 bytes of each."""
    gone = [replace(half, leaving=Leaving(60, seconds, Turns(*turn))) for half, turn in zip(KEPT, turns, strict=False)]
    return [*gone, *KEPT[len(gone) :]]


def walk() -> Walk:
    return Walk({}, (0, 0), (), Pass())


def forward(halves: list[Treated]) -> TimedPass:
    made = walk()
    for place, half in enumerate(halves, start=1):
        made.compute(2.0)
        made.hold(100)
        made.copy_out(place, half)
    return made.over()


def backward(halves: list[Treated]) -> TimedPass:
    made, away = walk(), [half for half in halves if half.leaving is not None]
    for place, half in reversed(list(enumerate(halves, start=1))):
        made.copy_back(place, away)
        made.needs(half.planned.key)
        made.compute(4.0)
        made.hold(-100)
    return made.over()


def copies(timed: TimedPass) -> list[tuple[float, float]]:
    return [(span.start_s, span.end_s) for span in timed.spans if span.kind in ("offload", "reload")]


def test_short_copies_cost_nothing() -> None:
    halves = leaving(2.0, (2, 2), (3, 3))
    out, back = forward(halves), backward(halves)
    assert (out.seconds, out.copy_wait_s) == (8.0, 0.0)
    assert (back.seconds, back.copy_wait_s) == (16.0, 0.0)
    assert copies(out) == [(2.0, 4.0), (4.0, 6.0)]
    assert copies(back) == [(4.0, 6.0), (8.0, 10.0)], "of the second half when backward comes to the third"
    assert out.memory == ((2.0, 100), (4.0, 100), (4.0, -60), (6.0, 100), (6.0, -60), (8.0, 100))
    assert curve_of_parts([(0.0, out.memory)]).bytes[-1] == 280
    assert back.memory == ((4.0, -100), (4.0, 60), (8.0, -100), (8.0, 60), (12.0, -100), (16.0, -100))


def test_long_copies_are_waited_for_at_their_turn() -> None:
    """The first should be over behind the second half, at 4, and is at 7; the third half ends at 9, the second copy at 12."""
    out = forward(leaving(5.0, (2, 2), (3, 3)))
    assert copies(out) == [(2.0, 7.0), (7.0, 12.0)]
    assert (out.seconds, out.copy_wait_s) == (14.0, 6.0)
    assert [span for span in out.spans if span.kind == "copy_wait"] == [
        Span("copy_wait", 4.0, 7.0, name="copy_wait"),
        Span("copy_wait", 9.0, 12.0, name="copy_wait"),
    ]


def test_long_copies_that_have_later_turns_are_hidden() -> None:
    halves = leaving(5.0, (4, 4))
    assert (forward(halves).seconds, backward(halves).seconds) == (8.0, 16.0)


def test_a_half_that_is_not_back_waits() -> None:
    halves = leaving(5.0, (2, 2))
    back = backward(halves)
    assert copies(back) == [(8.0, 13.0)]
    assert (back.seconds, back.copy_wait_s) == (17.0, 1.0)


def test_copies_back_follow_each_other() -> None:
    """Both are asked for when backward comes to the third half; the link brings one after the other."""
    halves = leaving(3.0, (2, 3), (3, 3))
    assert copies(backward(halves)) == [(4.0, 7.0), (7.0, 10.0)]


def test_a_recomputation_ahead_of_time_waits_for_its_half() -> None:
    made, halves = walk(), leaving(5.0, (2, 3))
    made.copy_back(3, halves[:1])
    made.needs(halves[0].planned.key)
    assert made.clock_s == 5.0


def test_what_the_host_issues_slowly_hides_copies() -> None:
    slow = forward(leaving(5.0, (2, 2))).issued_in(20.0)
    assert (slow.seconds, slow.copy_wait_s, slow.host_late_s) == (20.0, 0.0, 12.0), "the device needs 8"
