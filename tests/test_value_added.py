"""The table of what stock's best setting leaves: its parts are a whole step, and no bound is above its plan."""

from __future__ import annotations

import pytest

from benchmarks.value_added import line, parts_of
from megatron_lynx.advise import answered
from megatron_lynx.config.loader import job_path, load_job
from megatron_lynx.cost.update import update_s
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.stock.price import priced


@pytest.mark.parametrize("name", ["llama3-70b-h800-80g", "llama3-8b-a100-80g", "mixtral-8x7b-h800-80g"])
def test_parts_are_a_whole_step(name: str) -> None:
    job = load_job(job_path(name))
    profile = analytic_profile(job)
    answer = answered(job, profile, None, near=False)
    assert answer.stock is not None
    assert answer.planned is not None
    setting = answer.stock.setting
    parts = parts_of(job, profile, setting)
    assert parts.step_s == pytest.approx(priced(job, profile, setting).step.most_s + update_s(job, profile))
    assert 0 < parts.wgrad < parts.rest
    assert (parts.TP > 0) == (job.parallel.tensor > 1)
    assert (parts.exchanges > 0) == (job.parallel.expert > 1)
    text, (nothing, half, everything, waits, bubble, over_layouts) = line(name, answer, answer.stock, answer.planned)
    assert text.startswith(f"| {name} | {setting.name} | ")
    assert bubble <= waits <= nothing <= half <= everything
    assert over_layouts == half, "no other layout was searched"
