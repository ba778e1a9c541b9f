"""Plans whose recomputations would come too late, too early, too many at once, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of
from tests.tiny_jobs import tiny_job
from tests.transparency.plans import plan_for, recomputable


def raw_plan(*, gather: bool = False, **layout: Any) -> dict[str, Any]:
    job = tiny_job("llama", **layout)
    return plan_for(job, lambda layer: recomputable(job, gather=gather)).model_dump(mode="json")


def refused(raw: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as error:
        Plan.model_validate(raw)
    return str(error.value)


def test_a_window_behind_which_backward_was_there_already() -> None:
    raw = raw_plan(tensor=2)
    raw["stages"][0]["rules"][1]["windows"]["mlp"] = "bwd.mlp.0"
    assert "windows.mlp of layer 2 (bwd.mlp.0) comes after backward needs the half" in refused(raw)


def test_more_frames_ahead_than_the_depth_allows() -> None:
    raw = raw_plan(tensor=2)
    raw["stages"][0]["rules"][1]["windows"]["mlp"] = "bwd.mlp.0+1"
    assert "ahead_depth is 1, but 2 frames are regenerated ahead at bwd.mlp.0@3" in refused(raw)


def test_a_layer_above_the_stage() -> None:
    raw = raw_plan(tensor=2, pipeline=2, microbatches=4)
    raw["stages"][0]["rules"][1]["windows"]["attention"] = "bwd.mlp.0+1"
    assert "windows.attention of layer 2 (bwd.mlp.0+1) is no window of this stage" in refused(raw)


@pytest.mark.parametrize(
    ("windows", "ahead"),
    [
        ({}, (1, 1)),
        ({"attention": "bwd.mlp.0", "mlp": "on_demand"}, (2, 1)),
        ({"attention": "bwd.attention.0+1", "mlp": "bwd.attention.0+1"}, (3, 2)),
        ({"attention": "pipe.recv_backward", "mlp": "pipe.recv_backward"}, (1, 1)),
    ],
    ids=["on demand", "the half before", "the layer above", "no backward"],
)
def test_how_many_halves_before_its_own_backward_a_recomputation_begins(windows: dict[str, Any], ahead: tuple[int, int]) -> None:
    """What goes to the host half by half has to be back by then."""
    raw = raw_plan(tensor=2, pipeline=2, microbatches=4)
    raw["stages"][0]["ahead_depth"] = 3
    raw["stages"][0]["rules"][0]["windows"] = windows
    attention, mlp, *_ = timetable_of(Plan.model_validate(raw), 0).chunks[0]
    assert (attention.ahead, mlp.ahead) == ahead


def test_a_gather_behind_the_window_that_needs_it() -> None:
    raw = raw_plan(tensor=2, sequence_parallel=True, gather=True)
    raw["stages"][0]["rules"][0]["gather"]["attention"] = "bwd.mlp.2"
    assert "comes before the half's input is gathered" in refused(raw)


def test_the_window_of_a_gather_that_is_not_made_again() -> None:
    """Found by random plans: a half that gathers once has no backward window 1, and what was to hide there was exposed."""
    raw = raw_plan(tensor=2, sequence_parallel=True, gather=True)
    raw["stages"][0]["rules"][0]["windows"]["attention"] = "bwd.mlp.1"
    assert "windows.attention of layer 1 (bwd.mlp.1) is no window of this stage" in refused(raw)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("bwd.mlp.2 until rotary then bwd.mlp.0", "does not come after the window of the stretch before it"),
        ("bwd.mlp.0 until rotary then bwd.attention.1", "comes after backward needs the half"),
        (
            "bwd.mlp.0 until core_attention then bwd.mlp.2",
            "a recomputation stops before linear_qkv or rotary, not core_attention",
        ),
        ("bwd.mlp.0 until rotary then bwd.mlp.1 until linear_qkv then bwd.mlp.2", "nothing is left to run in bwd.mlp.1"),
    ],
)
def test_stretches_that_cannot_be_run(place: str, why: str) -> None:
    raw = raw_plan(tensor=2, sequence_parallel=True)
    raw["stages"][0]["rules"][0]["windows"]["attention"] = "bwd.mlp.0 until rotary then bwd.mlp.2"
    Plan.model_validate(raw)
    raw["stages"][0]["rules"][0]["windows"]["attention"] = place
    assert why in refused(raw)


def test_a_stretch_that_the_gather_runs() -> None:
    raw = raw_plan(tensor=2, sequence_parallel=True, gather=True)
    raw["stages"][0]["rules"][0]["windows"]["attention"] = "bwd.mlp.0 until linear_qkv then bwd.mlp.2"
    assert "what comes before linear_qkv runs where its input is gathered" in refused(raw)


def test_the_dropout_mask_is_needed_before_the_halfs_own_window() -> None:
    raw = raw_plan(tensor=2, sequence_parallel=True)
    raw["stages"][0]["rules"][3]["windows"]["mlp"] = "bwd.mlp.0"
    assert "comes after backward needs the half" in refused(raw)
