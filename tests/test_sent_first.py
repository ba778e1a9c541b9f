"""Plans that send gradients before weight gradients: where, what they hold, and that they are taken only if they gain."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.anatomy.address import SEND_BACKWARD
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import job_path, load_job
from megatron_lynx.config.parallel import Overlap
from megatron_lynx.cost.update import late_reduction_s, reduction_s
from megatron_lynx.planner import decide
from megatron_lynx.planner.evaluation import peak_bytes
from megatron_lynx.planner.filling import Filling
from megatron_lynx.profiler.analytic import analytic_profile

JOB = "gpt-175b-a100-80g"


def without(job: Job, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(Filling, "send_first", lambda filling: None)
        return decide(job, analytic_profile(job))


def sent(entry: Any) -> list[tuple[int, str]]:
    """(layer, linear) of an entry that wait for the send."""
    rules = ((layer, rule) for rule in entry.rules for layer in rule.layers)
    return [(layer, name) for layer, rule in rules for name, waits in rule.weight_gradients.items() if waits == (SEND_BACKWARD,)]


def test_a_plan_gains_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job(job_path(JOB))
    decided, before = decide(job, analytic_profile(job)), without(job, monkeypatch)
    assert decided.simulation.step_s < 0.99 * before.simulation.step_s
    assert [bool(sent(entry)) for entry in decided.plan.stages] == [False, *[True] * (job.parallel.pipeline - 1)]
    for stage in range(job.parallel.pipeline):
        assert peak_bytes(decided.job, decided.simulation, stage) <= decided.job.memory_budget_bytes
    assert "gradients sent before others" in decided.weight_gradients


def test_the_lowest_layers_come_first() -> None:
    """With memory for a few operands only; with none, nothing."""
    job = load_job(job_path(JOB))
    decided = decide(job.model_copy(update={"overlap": Overlap(weight_gradients="none")}), analytic_profile(job))
    peaks = [decided.simulation.memory(stage).peak_bytes for stage in range(job.parallel.pipeline)]
    few, none = (decided.filler.filled([peak // part for peak in peaks], sending=True) for part in (4, 10**12))
    assert none == decided.draft
    entry = few.stages[-1]
    layers = sorted({layer for layer, _ in sent(entry)})
    assert 0 < len(layers) < len(entry.layers)
    assert layers == [*range(entry.layers.first, entry.layers.first + len(layers))]


@pytest.mark.parametrize("name", ["llama3-8b-h800-80g", JOB])
def test_none_where_nothing_waits_or_it_is_not_wanted(name: str) -> None:
    """One stage; or a job without delayed weight gradients."""
    job = load_job(job_path(name))
    if job.parallel.pipeline > 1:
        job = job.model_copy(update={"overlap": Overlap(weight_gradients="none")})
    assert not any(sent(entry) for entry in decide(job, analytic_profile(job)).plan.stages)


def test_reductions_that_begin_later_and_end_after_the_step() -> None:
    """A stage's last weight gradients end 1 s before the step; 10 s before it hides what there is."""
    job = load_job(job_path("llama3-70b-h800-80g"))
    overlapped = job.model_copy(update={"overlap": Overlap(gradients=True)})
    whole_s = reduction_s(job)
    assert late_reduction_s(job, [0.0, 0.0]) == 0.0
    assert late_reduction_s(overlapped, [0.0, whole_s / 4, whole_s / 2]) == pytest.approx(0.75 * whole_s)
    assert late_reduction_s(overlapped, [0.0, 10.0, 10.0]) == 0.0
