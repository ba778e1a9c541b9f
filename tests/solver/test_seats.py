"""Which windows are offered for which half."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.anatomy import DENSE
from megatron_lynx.anatomy.address import ON_DEMAND, window_at
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.solver.options import HalfOptions, StageProblems
from tests.profiler.made_up import made_up_profile
from tests.solver.problems import LAYOUTS, catalogued

HALF = {"attention": 0, "mlp": 1, "last_mlp": -1}


def seats(name, stage, kind):
    return {option.window or ON_DEMAND for option in catalogued(name).of(stage).halves[HALF[kind]]}


def test_halves_have_the_windows_of_their_backward():
    assert seats("sequence parallelism", 0, "attention") == {ON_DEMAND, "bwd.attention.0"}
    assert seats("sequence parallelism", 0, "mlp") == {ON_DEMAND, "bwd.mlp.0", "bwd.attention.2+1"}
    assert seats("long windows", 0, "mlp") == {ON_DEMAND, "bwd.attention.0+1"}


def test_the_last_mlp_half_has_no_window_of_a_half_before_it():
    assert seats("long windows", 0, "last_mlp") == {ON_DEMAND}
    assert seats("sequence parallelism", 0, "last_mlp") == {ON_DEMAND, "bwd.mlp.0"}


def test_transformer_engines_recomputations_run_in_a_window_of_the_half_before():
    """In its first window those that need no gathered input, or have theirs from the half before that; which the attention half
    of the last layer has not."""
    problem = catalogued("Transformer Engine").of(0)
    found = {(option.gather, option.window) for option in problem.halves[1].plain if "activation" in option.recompute}
    assert {window for gather, window in found if gather is None} == {None, "bwd.attention.0+1", "bwd.attention.2+1"}
    assert {(gather, window) for gather, window in found if gather is not None} == {
        ("bwd.mlp.0+1", "bwd.attention.0+1"),
        ("bwd.attention.0+1", "bwd.attention.2+1"),
        ("bwd.attention.0+1", None),
    }
    gathers = {option.gather for option in problem.halves[0]}
    assert gathers - {option.gather for option in problem.halves[-2]} == {"bwd.attention.0+1"}
    assert {option.recompute for option in problem.halves[-2]} == {option.recompute for option in problem.halves[0]}


def test_without_tensor_parallelism_nothing_hides_a_recomputation():
    assert {*map(frozenset, (seats("no tensor parallelism", 0, half) for half in HALF))} == {frozenset({ON_DEMAND})}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_what_is_gathered_or_masked_is_seated_behind_that(name):
    problem = catalogued(name).of(0)
    for half, choices in zip(("attention", "mlp") * problem.layers, problem.halves, strict=True):
        for option in choices:
            if option.checkpoint is None:
                assert not (f"{half}_bda" in option.recompute and option.window == f"bwd.{half}.0")


def test_stages_that_are_alike_share_what_is_priced():
    stages = catalogued("sequence parallelism")
    assert stages.of(7).halves[0] is stages.of(0).halves[0]
    assert stages.of(7).halves[-1] is stages.of(0).halves[-1]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.floats(1e-9, 1e-2) | st.just(0.0))
def test_windows_without_length_are_no_seats(name, link_s):
    job = catalogued(name).job
    problem = StageProblems(job, HalfOptions(job, made_up_profile(job, link_s=link_s))).of(0)
    for choices in problem.halves[:2]:
        assert all(option.hidden_s > 0 for option in choices.plain if option.window and not option.gather)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_window_hides_as_much_as_fits_in_it(name):
    """What is recomputed beside communication takes longer."""
    stages = catalogued(name)
    profile, at_hand = stages.options.profile, stages.of(0).halves[:2]
    for option in (option for choices in at_hand for option in choices.plain if not option.gather):
        place = option.window and window_at(option.window, 1)
        lengths_s = window_lengths_s(profile, "bwd", DENSE[place.half], profile.message_bytes) if place else (0.0,)
        fits_s = lengths_s[place.ordinal if place else 0] / profile.interference
        assert option.hidden_s == pytest.approx(min(option.recompute_s, fits_s))


def test_what_is_recomputed_or_gathered_in_an_earlier_backward_is_held_from_there_on():
    """From one moment before the half's own backward for the last window of the half before, from two for those before. A
    gathered input may be there from two halves before."""
    windows = ({"bwd.mlp.0": 2}, {"bwd.attention.0+1": 2, "bwd.attention.2+1": 1})
    gathers = ({"bwd.mlp.0": 2, "bwd.attention.0+1": 4}, {"bwd.attention.0+1": 2, "bwd.mlp.0+1": 4})
    for choices, begins, gathered in zip(catalogued("Transformer Engine").of(0).halves[:2], windows, gathers, strict=True):
        assert {option.window for option in choices.plain} == {None, *begins}
        assert {option.gather for option in choices.plain} == {None, *gathered}
        for option in choices.plain:
            recomputed, there = begins.get(option.window, 0), gathered.get(option.gather, 0)
            ahead, regenerated = option.memory.ahead, option.memory.regenerated
            assert ahead[:recomputed] == (regenerated,) * recomputed
            assert all(0 < size <= regenerated for size in ahead[recomputed:there])
            assert not any(ahead[max(recomputed, there) :])
