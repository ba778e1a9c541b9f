"""Placements: what their windows hide of a recomputation, and when what they regenerate exists."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import ATTENTION
from megatron_lynx.anatomy.address import ON_DEMAND, Stretch, stretches_in
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import PricedSection, Progress
from megatron_lynx.solver.seats import NOWHERE, ON_DEMAND_SEAT, Placement, Portion, Seat, Wait, held_in
from tests.solver.problems import catalogued


def test_on_demand_everything_is_exposed() -> None:
    assert NOWHERE.window == ON_DEMAND
    assert ON_DEMAND_SEAT.exposed_s(3.0, 1.5) == 3.0


def test_portions_hide_as_much_as_their_seconds_together() -> None:
    several = Placement([Portion(Wait("bwd.mlp.0", 1.0), 2.0, "rotary"), Portion(Wait("bwd.mlp.2", 0.5))])
    assert Seat(several).exposed_s(4.0, 1.0) == 2.5
    assert Seat(several).exposed_s(4.0, 2.0) == 3.25


def test_a_window_hides_no_more_than_what_runs_in_it() -> None:
    """What is left over runs on demand: here 1 s, and of 3 s in the window of 2 s another one."""
    several = Placement([Portion(Wait("bwd.mlp.0", 5.0), 1.0, "rotary"), Portion(Wait("bwd.mlp.2", 2.0), 3.0)])
    assert several.hidden_s(4.0, 1.0) == 3.0
    assert several.hidden_s(4.0, 2.0) == 2.0
    begun = Placement([Portion(Wait("bwd.mlp.0", 5.0), 1.0, "rotary")])
    assert Seat(begun).exposed_s(4.0, 1.0) == 3.0


def test_what_a_plan_file_says() -> None:
    begun = Portion(Wait("bwd.mlp.0", 1.0), 1.0, "rotary")
    assert Placement([begun, Portion(Wait("bwd.mlp.2", 0.5))]).window == "bwd.mlp.0 until rotary then bwd.mlp.2"
    assert Placement([begun]).window == "bwd.mlp.0 until rotary then on_demand"
    assert stretches_in("bwd.mlp.0 until rotary then bwd.mlp.2") == (Stretch("bwd.mlp.0", "rotary"), Stretch("bwd.mlp.2"))


STOPS = {"linear_qkv": Progress(1.0, 5), "rotary": Progress(2.0, 20)}
"""30 bytes are regenerated in all."""


@pytest.mark.parametrize(
    ("portions", "gather", "ahead"),
    [
        ([(0, None)], 0, (0, 0, 0, 0)),
        ([(1, None)], 0, (30, 0, 0, 0)),
        ([(4, None)], 0, (30, 30, 30, 30)),
        ([], 2, (5, 5, 0, 0)),
        ([(2, "rotary"), (1, None)], 4, (30, 20, 5, 5)),
    ],
)
def test_when_what_an_attention_half_regenerates_is_there(
    portions: list[tuple[int, str | None]], gather: int, ahead: tuple[int, ...]
) -> None:
    placement = Placement(Portion(Wait("", 1.0, moments), until=until) for moments, until in portions)
    price = PricedSection(HalfMemory(10, 30, 10), stops=STOPS)
    assert held_in(price, ATTENTION, Seat(placement, gather_ahead=gather)).ahead == ahead


def test_windows_of_an_earlier_backward_begin_moments_ahead() -> None:
    """One moment for its last window, two for those before. A gathered input may be there from two halves before."""
    halves = catalogued("Transformer Engine").of(0).halves[:2]
    waits = {portion.wait for choices in halves for option in choices.plain for portion in option.seat.placement}
    ahead = {wait.window: wait.ahead for wait in waits}
    assert ahead == {"bwd.mlp.0": 2, "bwd.attention.0+1": 2, "bwd.attention.2+1": 1}
    gathered = {option.seat.gather: option.seat.gather_ahead for option in halves[1] if option.seat.gather}
    assert gathered == {"bwd.attention.0+1": 2, "bwd.mlp.0+1": 4}
