"""Which windows are offered for which half."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.anatomy import DENSE
from megatron_lynx.anatomy.address import ON_DEMAND, Stretch, stretches_in, window_at
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.solver.options import HalfOptions, StageProblems
from tests.profiler.made_up import made_up_profile
from tests.solver.problems import LAYOUTS, catalogued

HALF = {"attention": 0, "mlp": 1, "last_mlp": -1}


def seats(name, stage, kind):
    """Windows in which recomputations begin."""
    choices = catalogued(name).of(stage).halves[HALF[kind]]
    return {stretches_in(option.window)[0].window if option.window else ON_DEMAND for option in choices}


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
    found = {(option.gather, option.window) for option in problem.halves[1].plain if "activation" in option.recompute}
    assert (None, "bwd.attention.0+1") in found
    assert ("bwd.mlp.0+1", "bwd.attention.0+1 until activation then bwd.attention.2+1") in found
    assert {("bwd.attention.0+1", "bwd.attention.2+1"), ("bwd.attention.0+1", None)} <= found
    assert not any(gather == "bwd.attention.0+1" and (window or "").startswith("bwd.attention.0+1") for gather, window in found)
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


def parts_of(name, option):
    """Each window of an option (None: on demand), the seconds of recomputation in it, and the bytes that there are after it."""
    price = catalogued(name).options.prices.of(
        DENSE["mlp" if "activation" in option.recompute else "attention"], option.recompute
    )
    done_s, stretches = 0.0, stretches_in(option.window) if option.window else (Stretch(ON_DEMAND),)
    for window, until in stretches:
        end_s, size = (price.recompute_s, price.memory.regenerated)
        if until is not None:
            end_s, size = price.stops[until].seconds, price.stops[until].bytes
        yield None if window == ON_DEMAND else window, end_s - done_s, size
        done_s = end_s


def of_one_half(choices):
    """Options whose items say which half is theirs."""
    return [option for option in choices.plain if {"activation", "core_attention"} & {*option.recompute}]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_window_hides_as_much_as_fits_in_it(name):
    """What is recomputed beside communication takes longer. What does not fit in one window does not run in the next."""
    profile, several = catalogued(name).options.profile, 0
    for option in (
        option for choices in catalogued(name).of(0).halves[:2] for option in of_one_half(choices) if not option.gather
    ):
        hidden_s, parts = 0.0, [*parts_of(name, option)]
        for place, seconds in ((window_at(window, 1), seconds) for window, seconds, _ in parts if window):
            lengths_s = window_lengths_s(profile, "bwd", DENSE[place.half], profile.message_bytes)
            hidden_s += min(seconds, lengths_s[place.ordinal] / profile.interference)
        assert option.hidden_s == pytest.approx(hidden_s)
        several += len(parts) > 1
    assert several or name in ("no tensor parallelism", "all-reduces")


def test_what_is_recomputed_or_gathered_in_an_earlier_backward_is_held_from_there_on():
    """From one moment before the half's own backward for the last window of the half before, from two for those before. A
    gathered input may be there from two halves before."""
    windows = ({"bwd.mlp.0": 2}, {"bwd.attention.0+1": 2, "bwd.attention.2+1": 1})
    gathers = ({"bwd.mlp.0": 2, "bwd.attention.0+1": 4}, {"bwd.attention.0+1": 2, "bwd.mlp.0+1": 4})
    for choices, begins, gathered in zip(catalogued("Transformer Engine").of(0).halves[:2], windows, gathers, strict=True):
        assert {option.gather for option in choices.plain} == {None, *gathered}
        for option in of_one_half(choices):
            held, there = [0] * len(option.memory.ahead), gathered.get(option.gather, 0)
            for window, _, size in parts_of("Transformer Engine", option):
                recomputed = begins.get(window, 0)
                held[:recomputed] = [size] * recomputed
            begun = sum(map(bool, held))
            assert list(option.memory.ahead[:begun]) == held[:begun]
            assert all(0 < size <= option.memory.regenerated for size in option.memory.ahead[begun:there])
            assert not any(option.memory.ahead[max(begun, there) :])
