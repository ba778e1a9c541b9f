"""Checkpointed layers begin ahead where that takes no memory: the planner chooses it, and the simulator finds that it is so."""

from __future__ import annotations

import pytest

from benchmarks.never_less import decided
from benchmarks.when_not import job_of
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import job_path, load_job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.stock import FULL, priced

TENSORS = {"tensor": 4, "pipeline": 2, "microbatches": 16}
JOBS: dict[str, Job] = {
    "tokens": load_job(job_path("jobs/deepseek-v2-lite-h100-80g")),
    "a reduction": job_of({"model": "llama3-8b", "cluster": "h800-80g", **TENSORS}),
}


@pytest.mark.parametrize("name", JOBS)
def test_it_takes_seconds_and_no_memory(name: str) -> None:
    """At the bytes of stock's full recomputation."""
    job = JOBS[name]
    profile = analytic_profile(job)
    decision, _ = decided(job, profile, priced(job, profile, FULL).most_bytes)
    plan, planned = decision.plan, job.model_copy(update={"policy": "planned"})
    begun, late = (rehearse(each, profile, job=planned) for each in (plan, on_demand(plan)))
    assert begun.step_s < 0.995 * late.step_s
    for stage in range(plan.parallel.pipeline):
        assert begun.memory(stage).peak_bytes == late.memory(stage).peak_bytes
        assert begun.total(stage, "exposed_s") <= late.total(stage, "exposed_s")


def on_demand(plan: Plan) -> Plan:
    """The same plan with nothing begun ahead."""
    raw = plan.model_dump(mode="json", exclude_defaults=True)
    rules = [rule for stage in raw["stages"] for rule in stage["rules"]]
    assert any(rule.pop("ahead", False) for rule in rules)
    for rule in rules:
        rule.pop("ahead", None)
    return Plan.model_validate(raw)
