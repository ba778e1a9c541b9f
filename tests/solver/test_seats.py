"""Which windows are offered for which half."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.schedule.windows import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.solver.options import StageProblems
from tests.profiler.made_up import made_up_profile
from tests.solver.problems import LAYOUTS, catalogued

FORWARD = {"attention": ("fwd.attention.0", "fwd.attention.1"), "mlp": ("fwd.mlp.0", "fwd.mlp.1")}


def seats(name, stage, kind):
    return {option.seat.steady for option in getattr(catalogued(name).of(stage), kind)}


def test_halves_have_the_windows_of_their_backward_and_of_their_forward():
    assert seats("sequence parallelism", 0, "attention") == {ON_DEMAND, "bwd.attention.0", "fwd.attention.1"}
    assert seats("sequence parallelism", 0, "mlp") == {ON_DEMAND, "bwd.mlp.0", "bwd.attention.2+1", "fwd.mlp.1"}
    assert seats("long windows", 0, "mlp") == {ON_DEMAND, "bwd.attention.0+1", "fwd.mlp.0"}


def test_the_last_mlp_half_has_no_window_of_a_half_before_it():
    assert seats("long windows", 0, "last_mlp") == {ON_DEMAND, "fwd.mlp.0", RECV_BACKWARD}
    assert seats("sequence parallelism", 0, "last_mlp") == {ON_DEMAND, "bwd.mlp.0", "fwd.mlp.1", RECV_BACKWARD}


@pytest.mark.parametrize("kind", ["attention", "mlp", "last_mlp"])
def test_on_the_last_stage_no_forward_and_no_receive_comes_in_time(kind):
    assert not any(window.startswith(("fwd.", "pipe.")) for window in seats("long windows", 7, kind))


def test_without_tensor_parallelism_only_the_receive_hides_something():
    assert seats("no tensor parallelism", 0, "attention") == seats("no tensor parallelism", 0, "mlp") == {ON_DEMAND}
    assert seats("no tensor parallelism", 0, "last_mlp") == {ON_DEMAND, RECV_BACKWARD}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_what_is_gathered_or_masked_is_seated_behind_that(name):
    problem = catalogued(name).of(0)
    for half, choices in (("attention", problem.attention), ("mlp", problem.mlp), ("mlp", problem.last_mlp)):
        for option in choices:
            early = option.seat.steady in (*FORWARD[half], RECV_BACKWARD)
            assert not (early and option.seat.gather)
            assert (option.memory.early > 0) == early
            assert not (f"{half}_bda" in option.replay and option.seat.steady == f"bwd.{half}.0")


def test_in_cool_down_a_forward_seat_is_the_longest_that_is_left():
    found = {option.replay: option.seat for option in catalogued("long windows").of(0).attention if option.memory.early}
    assert {seat.cooldown for seat in found.values()} == {"bwd.mlp.0"}
    last = [option.seat.cooldown for option in catalogued("long windows").of(0).last_mlp if option.memory.early]
    assert set(last) == {RECV_BACKWARD}


def test_stages_that_are_alike_share_what_is_priced():
    stages = catalogued("sequence parallelism")
    assert stages.of(7).attention is stages.of(7, layers=3).attention
    assert len(stages.of(0).attention) > len(stages.of(7).attention)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.floats(0, 1e-2) | st.just(0.0))
def test_windows_without_length_are_no_seats(name, link_s):
    job = catalogued(name).job
    problem = StageProblems(job, made_up_profile(job, link_s=link_s)).of(0)
    for choices in (problem.attention, problem.mlp):
        assert all(option.seat.steady == ON_DEMAND or option.seat.steady_s > 0 for option in choices)
