"""Placements: what their windows hide of a recomputation, and when what they regenerate exists."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import ATTENTION
from megatron_lynx.anatomy.address import ON_DEMAND, Stretch, stretches_in
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import Progress
from megatron_lynx.solver.seats import NOWHERE, ON_DEMAND_SEAT, Placement, Portion, Seat, held_in, moments_ahead


def test_on_demand_everything_is_exposed() -> None:
    assert NOWHERE.on_demand
    assert NOWHERE.window == ON_DEMAND
    assert ON_DEMAND_SEAT.exposed_s(3.0, 1.5) == 3.0


def test_portions_hide_as_much_as_their_seconds_together() -> None:
    several = Placement([Portion("bwd.mlp.0", 1.0, 2.0, "rotary"), Portion("bwd.mlp.2", 0.5)])
    assert Seat(several).exposed_s(4.0, 1.0) == 2.5
    assert Seat(several).exposed_s(4.0, 2.0) == 3.25


def test_a_window_hides_no_more_than_what_runs_in_it() -> None:
    """What is left over runs on demand: here 1 s, and of 3 s in the window of 2 s another one."""
    several = Placement([Portion("bwd.mlp.0", 5.0, 1.0, "rotary"), Portion("bwd.mlp.2", 2.0, 3.0)])
    assert several.hidden_s(4.0, 1.0) == 3.0
    assert several.hidden_s(4.0, 2.0) == 2.0
    begun = Placement([Portion("bwd.mlp.0", 5.0, 1.0, "rotary")])
    assert Seat(begun).exposed_s(4.0, 1.0) == 3.0


def test_what_a_plan_file_says() -> None:
    begun = Portion("bwd.mlp.0", 1.0, 1.0, "rotary")
    assert Placement([begun, Portion("bwd.mlp.2", 0.5)]).window == "bwd.mlp.0 until rotary then bwd.mlp.2"
    assert Placement([begun]).window == "bwd.mlp.0 until rotary then on_demand"
    assert stretches_in("bwd.mlp.0 until rotary then bwd.mlp.2") == (Stretch("bwd.mlp.0", "rotary"), Stretch("bwd.mlp.2"))


STOPS = {"linear_qkv": Progress(1.0, 5), "rotary": Progress(2.0, 20)}
"""30 bytes are regenerated in all."""


@pytest.mark.parametrize(
    ("portions", "gather", "ahead"),
    [
        ([("bwd.attention.0", None)], None, (0, 0, 0, 0)),
        ([("bwd.mlp.2", None)], None, (30, 0, 0, 0)),
        ([("bwd.mlp.1", None)], None, (30, 30, 0, 0)),
        ([("bwd.attention.2+1", None)], None, (30, 30, 30, 0)),
        ([("bwd.attention.0+1", None)], None, (30, 30, 30, 30)),
        ([], "bwd.mlp.0", (5, 5, 0, 0)),
        ([("bwd.mlp.0", "rotary"), ("bwd.mlp.2", None)], "bwd.attention.0+1", (30, 20, 5, 5)),
    ],
)
def test_when_what_an_attention_half_regenerates_is_there(
    portions: list[tuple[str, str | None]], gather: str | None, ahead: tuple[int, ...]
) -> None:
    placement = Placement(Portion(window, 1.0, until=until) for window, until in portions)
    memory = held_in(HalfMemory(10, 30, 10), ATTENTION, placement, gather, STOPS, sequence_parallel=True)
    assert memory.ahead == ahead


def test_an_mlp_half_follows_the_attention_half_above() -> None:
    """Without sequence parallelism a half has one window, its last."""
    ahead = [moments_ahead(window, "mlp", sequence_parallel=False) for window in ("bwd.attention.0+1", "bwd.mlp.0+1")]
    assert ahead == [1, 3]
