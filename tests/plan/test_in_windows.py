"""Norms of a plan that run while something is communicated."""

from __future__ import annotations

from megatron_lynx.plan.timetables import norms_in_windows
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan


def test_norms_run_in_windows_but_where_their_output_is_gathered() -> None:
    job = tiny_job("llama", tensor=2, sequence_parallel=True)
    assert norms_in_windows(uniform_plan(job)) == ("input_layernorm", "pre_mlp_layernorm")
    assert norms_in_windows(uniform_plan(job, gather="once")) == ()
    assert norms_in_windows(uniform_plan(job, ["activation"])) == ()
    assert norms_in_windows(uniform_plan(tiny_job("gpt", tensor=2), windows=False)) == ()
