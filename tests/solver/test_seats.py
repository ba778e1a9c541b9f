"""Which windows are offered for which half."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.solver.options import HalfOptions, StageProblems
from tests.profiler.made_up import made_up_profile
from tests.solver.problems import LAYOUTS, catalogued

HALF = {"attention": 0, "mlp": 1, "last_mlp": -1}


def begun(placement):
    """The window in which a recomputation begins."""
    return placement[0].wait.window if placement else ON_DEMAND


def seats(name, stage, kind):
    return {begun(option.seat.placement) for option in catalogued(name).of(stage).halves[HALF[kind]]}


def test_halves_have_the_windows_of_their_backward():
    assert seats("sequence parallelism", 0, "attention") == {ON_DEMAND, "bwd.attention.0"}
    assert seats("sequence parallelism", 0, "mlp") == {ON_DEMAND, "bwd.mlp.0", "bwd.attention.2+1"}
    assert seats("long windows", 0, "mlp") == {ON_DEMAND, "bwd.attention.0+1"}


def test_the_last_mlp_half_has_no_window_of_a_half_before_it():
    assert seats("long windows", 0, "last_mlp") == {ON_DEMAND}
    assert seats("sequence parallelism", 0, "last_mlp") == {ON_DEMAND, "bwd.mlp.0"}


def test_transformer_engines_recomputations_run_in_the_windows_of_the_half_before_stretch_by_stretch():
    """In its first window those that need no gathered input, or have theirs from the half before that; which the attention half
    of the last layer has not."""
    problem = catalogued("Transformer Engine").of(0)
    seats = [option.seat for option in problem.halves[1] if "activation" in option.recompute]
    found = {(seat.gather, seat.placement.window) for seat in seats}
    assert (None, "bwd.attention.0+1") in found
    assert ("bwd.mlp.0+1", "bwd.attention.0+1 until activation then bwd.attention.2+1") in found
    assert ("bwd.attention.0+1", "bwd.attention.2+1") in found
    assert not any(gather == "bwd.attention.0+1" and window.startswith("bwd.attention.0+1") for gather, window in found)
    gathers = {option.seat.gather for option in problem.halves[0]}
    assert gathers - {option.seat.gather for option in problem.halves[-2]} == {"bwd.attention.0+1"}
    assert {option.recompute for option in problem.halves[-2]} == {option.recompute for option in problem.halves[0]}


def test_without_tensor_parallelism_nothing_hides_a_recomputation():
    assert {*map(frozenset, (seats("no tensor parallelism", 0, half) for half in HALF))} == {frozenset({ON_DEMAND})}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_what_is_gathered_or_masked_is_seated_behind_that(name):
    problem = catalogued(name).of(0)
    for half, choices in zip(("attention", "mlp") * problem.layers, problem.halves, strict=True):
        for option in choices:
            if option.checkpoint is None:
                assert not (f"{half}_bda" in option.recompute and option.seat.placement.window == f"bwd.{half}.0")


def test_stages_that_are_alike_share_what_is_priced():
    stages = catalogued("sequence parallelism")
    assert stages.of(7).halves[0] is stages.of(0).halves[0]
    assert stages.of(7).halves[-1] is stages.of(0).halves[-1]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.floats(0, 1e-2) | st.just(0.0))
def test_windows_without_length_are_no_seats(name, link_s):
    job = catalogued(name).job
    problem = StageProblems(job, HalfOptions(job, made_up_profile(job, link_s=link_s))).of(0)
    for choices in problem.halves[:2]:
        assert all(portion.wait.seconds > 0 for option in choices for portion in option.seat.placement)
