"""Placements: what their windows hide of a replay, and when what they regenerate exists."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.solver.placement import NOWHERE, ON_DEMAND_SEAT, Placement, Portion, Seat


def test_on_demand_everything_is_exposed() -> None:
    assert NOWHERE.on_demand
    assert NOWHERE.window == ON_DEMAND
    assert not NOWHERE.early
    assert not NOWHERE.ahead("mlp")
    assert ON_DEMAND_SEAT.exposed_s(3.0, 1.5) == 3.0


def test_portions_hide_as_much_as_their_seconds_together() -> None:
    several = Placement([Portion("bwd.mlp.0", 1.0), Portion("bwd.mlp.2", 0.5)])
    seat = Seat(several, Placement.in_window("bwd.mlp.2", 0.5), steady_share=0.75)
    assert several.seconds == 1.5
    assert seat.exposed_s(4.0, 1.0) == 0.75 * 2.5 + 0.25 * 3.5
    assert seat.exposed_s(4.0, 2.0) == 0.75 * 3.25 + 0.25 * 3.75


def test_a_plan_file_has_one_name_for_each_phase() -> None:
    assert Placement.in_window(RECV_BACKWARD, 0.0).window == RECV_BACKWARD
    with pytest.raises(ValueError, match="too many values"):
        _ = Placement([Portion("bwd.mlp.0", 1.0), Portion("bwd.mlp.2", 0.5)]).window


@pytest.mark.parametrize(
    ("window", "early", "ahead"),
    [
        ("fwd.attention.1", True, False),
        (RECV_BACKWARD, True, False),
        ("bwd.mlp.0", False, True),
        ("bwd.attention.0", False, False),
        ("bwd.attention.0+1", False, True),
    ],
)
def test_when_an_attention_half_that_is_replayed_there_exists(window: str, early: bool, ahead: bool) -> None:
    placement = Placement.in_window(window, 1.0)
    assert (placement.early, placement.ahead("attention")) == (early, ahead)
