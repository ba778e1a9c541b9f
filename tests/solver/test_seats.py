"""Which windows are offered for which half."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.solver.options import StageProblems
from tests.config.jobs import catalogued_job
from tests.profiler.made_up import made_up_profile
from tests.solver.problems import LAYOUTS, catalogued

HALF = {"attention": 0, "mlp": 1, "last_mlp": -1}


def begun(placement):
    """The window in which a recomputation begins."""
    return placement[0].window if placement else ON_DEMAND


def seats(name, stage, kind):
    return {begun(option.seat.steady) for option in catalogued(name).of(stage).halves[HALF[kind]]}


def test_halves_have_the_windows_of_their_backward():
    assert seats("sequence parallelism", 0, "attention") == {ON_DEMAND, "bwd.attention.0"}
    assert seats("sequence parallelism", 0, "mlp") == {ON_DEMAND, "bwd.mlp.0", "bwd.attention.2+1"}
    assert seats("long windows", 0, "mlp") == {ON_DEMAND, "bwd.attention.0+1"}


def test_the_last_mlp_half_has_no_window_of_a_half_before_it():
    assert seats("long windows", 0, "last_mlp") == {ON_DEMAND, RECV_BACKWARD}
    assert seats("sequence parallelism", 0, "last_mlp") == {ON_DEMAND, "bwd.mlp.0", RECV_BACKWARD}


def test_transformer_engines_recomputations_run_in_the_windows_of_the_half_before_stretch_by_stretch():
    """In its first window those that need no gathered input, or have theirs from the half before that; which the attention half
    of the last layer has not."""
    problem = catalogued("Transformer Engine").of(0)
    found = {(option.seat.gather, option.seat.steady.window) for option in problem.halves[1] if "activation" in option.recompute}
    assert (None, "bwd.attention.0+1") in found
    assert ("bwd.mlp.0+1", "bwd.attention.0+1 until activation then bwd.attention.2+1") in found
    assert ("bwd.attention.0+1", "bwd.attention.2+1") in found
    assert not any(gather == "bwd.attention.0+1" and window.startswith("bwd.attention.0+1") for gather, window in found)
    gathers = {option.seat.gather for option in problem.halves[0]}
    assert gathers - {option.seat.gather for option in problem.halves[-2]} == {"bwd.attention.0+1"}
    assert [option.recompute for option in problem.halves[-2]] == [option.recompute for option in problem.halves[0]]


@pytest.mark.parametrize("kind", ["attention", "mlp", "last_mlp"])
def test_on_the_last_stage_no_receive_comes_in_time(kind):
    assert not any(window.startswith("pipe.") for window in seats("long windows", 7, kind))


def test_without_tensor_parallelism_only_the_receive_hides_something():
    assert seats("no tensor parallelism", 0, "attention") == seats("no tensor parallelism", 0, "mlp") == {ON_DEMAND}
    assert seats("no tensor parallelism", 0, "last_mlp") == {ON_DEMAND, RECV_BACKWARD}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_what_is_gathered_or_masked_is_seated_behind_that(name):
    problem = catalogued(name).of(0)
    for half, choices in zip(("attention", "mlp") * problem.layers, problem.halves, strict=True):
        for option in choices:
            early = RECV_BACKWARD in (begun(option.seat.steady), begun(option.seat.cooldown))
            assert not (early and option.seat.gather)
            assert (option.memory.early > 0) == early
            if option.checkpoint is None:
                assert not (f"{half}_bda" in option.recompute and option.seat.steady.window == f"bwd.{half}.0")


def test_stages_that_are_alike_share_what_is_priced():
    stages = catalogued("sequence parallelism")
    assert stages.of(7).halves[0] is stages.of(0).halves[0]
    assert len(stages.of(0).halves[-1]) > len(stages.of(7).halves[-1])


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.floats(0, 1e-2) | st.just(0.0))
def test_windows_without_length_are_no_seats(name, link_s):
    job = catalogued(name).job
    problem = StageProblems(job, made_up_profile(job, link_s=link_s)).of(0)
    for choices in problem.halves[:2]:
        assert all(option.seat.steady.on_demand or option.seat.steady.seconds > 0 for option in choices)


def chunked(**layout):
    """Four stages of four chunks, of three layers each."""
    parallel = {"tensor": 8, "pipeline": 4, "layers_per_chunk": 3} | layout
    job = catalogued_job("gpt-22b", "a100-80g-pcie", parallel=parallel, policy="planned", batch=16 * 8)
    return StageProblems(job, analytic_profile(job))


def names(choices):
    return {(begun(option.seat.steady), begun(option.seat.cooldown)) for option in choices}


def test_chunks_have_the_windows_of_their_backwards_and_the_last_half_the_receive():
    problem = chunked().of(0)
    assert {steady for steady, _ in names(problem.halves[1])} == {ON_DEMAND, "bwd.attention.0+1"}
    assert names(problem.halves[-1]) == {(ON_DEMAND,) * 2, (RECV_BACKWARD,) * 2}


def test_of_the_last_stage_only_the_models_last_chunk_has_none():
    stages = chunked()
    assert stages.of(3, chunks=(0, 1, 2, 3)).halves[1] == stages.of(3, chunks=(3,)).halves[1]
    assert {steady for steady, _ in names(stages.of(3, chunks=(3,)).halves[-1])} == {ON_DEMAND}
    assert {steady for steady, _ in names(stages.of(3, chunks=(0, 1, 2)).halves[-1])} == {ON_DEMAND, RECV_BACKWARD}


def test_the_last_chunk_waits_for_a_forward_of_the_stages_behind():
    """The others' backwards follow one another on all stages; in larger groups not even a message is waited for."""
    stages, grouped = chunked(), chunked(microbatch_group=8)
    waits = [stages.seats(0, (chunk,)).received_s for chunk in range(4)]
    assert waits[0] == waits[1] == waits[2] == stages.seats(3, (0,)).received_s < waits[3]
    assert grouped.seats(0, (0,)).received_s == 0
    assert grouped.seats(3, (0,)).received_s is None


def test_phases_are_counted_by_chunk():
    """Of 16 micro-batches: stage 0 has 12 + 6 backwards in cool-down, four of each chunk, and two of the group before."""
    stages = chunked()
    assert [stages.seats(0, (chunk,)).phases.cooldown for chunk in range(4)] == [6, 4, 4, 4]
    assert [stages.seats(3, (chunk,)).phases.cooldown for chunk in range(4)] == [4, 4, 4, 0]
    assert stages.seats(0).phases.steady == 4 * 16 - 18
