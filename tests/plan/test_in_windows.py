"""What of a plan runs while something is communicated."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.plan.timetables import groups_waited_for, norms_in_windows
from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.candidates import deferring
from megatron_lynx.testbed.tiny_jobs import tiny_job

EXPERTS = {"experts": {"count": 4, "per_token": 2, "ffn": 32, "layers": "all"}, "bias": False}


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        ({"tensor": 2}, ("tp",)),
        ({"pipeline": 2}, ("pp",)),
        ({"tensor": 2, "pipeline": 2}, ("tp", "pp")),
        ({}, ()),
    ],
)
def test_groups_in_whose_windows_everything_is_recomputed(layout: dict[str, Any], groups: tuple[str, ...]) -> None:
    assert groups_waited_for(uniform_plan(tiny_job("gpt", **layout))) == groups


def test_experts_wait_for_exchanges_of_tokens() -> None:
    job = tiny_job("gpt", replicas=2, expert=2, **EXPERTS)
    assert groups_waited_for(uniform_plan(job, ["experts_fc1", "experts_activation"])) == ("ep",)


def test_a_plan_without_windows_waits_for_nobody() -> None:
    assert groups_waited_for(uniform_plan(tiny_job("gpt", tensor=2), windows=False)) == ()
    assert norms_in_windows(uniform_plan(tiny_job("gpt", tensor=2), windows=False)) == ()


def test_a_weight_gradient_waits_too() -> None:
    assert groups_waited_for(deferring(uniform_plan(tiny_job("gpt", tensor=2), "none"))) == ("tp",)


def test_norms_run_in_windows_but_where_their_output_is_gathered() -> None:
    job = tiny_job("llama", tensor=2, sequence_parallel=True)
    assert norms_in_windows(uniform_plan(job)) == ("input_layernorm", "pre_mlp_layernorm")
    assert norms_in_windows(uniform_plan(job, gather="once")) == ()
    assert norms_in_windows(uniform_plan(job, ["activation"])) == ()
