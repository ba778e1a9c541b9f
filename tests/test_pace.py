"""When a half is away and when it comes back, by hand."""

from __future__ import annotations

from megatron_lynx.pace import AFTERWARDS, Pace, Turns


def test_copies_that_take_longer_than_a_half_queue_up() -> None:
    """The picture in the module: three bytes of each half, two beside each."""
    pace = Pace(2, 6)
    assert [pace.leaves(half, 3).away for half in (1, 2, 3)] == [3, 4, 6]
    assert pace.leaves(5, 3) == Turns(6, 6), "with the last half at the latest"


def test_short_copies_are_over_behind_the_next_half() -> None:
    pace = Pace(100, 6)
    assert [pace.leaves(half, 3) for half in (1, 3, 5)] == [Turns(2, 2), Turns(4, 4), Turns(6, 6)]


def test_what_was_not_busy_does_not_hold_up_what_comes_later() -> None:
    pace = Pace(10, 8)
    assert pace.leaves(1, 25).away == 4
    assert pace.leaves(6, 5).away == 7


def test_a_recomputation_ahead_of_time_finds_its_half_back_and_nothing_below_comes_earlier() -> None:
    pace = Pace(100, 8)
    assert pace.leaves(1, 1, ahead=4) == Turns(2, 5)
    assert pace.leaves(2, 1) == Turns(3, 5), "the stack of what is away is taken from its top"
    assert pace.leaves(6, 1, ahead=9) == Turns(7, 8)


def test_the_last_half_stays() -> None:
    assert [Pace(1, 4).stays(half) for half in (3, 4)] == [False, True]


def test_without_a_pace_everything_moves_outside_of_the_passes() -> None:
    pace = Pace(None, 4)
    assert [pace.stays(half) for half in (1, 4)] == [False, False]
    assert [pace.leaves(half, 100, ahead=2) for half in (1, 4)] == [Turns(AFTERWARDS, AFTERWARDS)] * 2
