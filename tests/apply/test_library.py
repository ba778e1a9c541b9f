"""A loop of one's own: docs/launching.md, as it stands there."""

from __future__ import annotations

import pytest

from megatron_lynx.plan import save_plan
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..long import long
from ..transparency.offloaded import offloading
from ..transparency.plans import plan_for
from ..transparency.test_overlapped import job_of as overlapped_job
from . import library_on_ranks

LAYOUTS = [{"tensor": 2, "sequence_parallel": True}, *long({"pipeline": 2, "microbatches": 4})]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_loop_of_the_page(pool_of, layout):
    """Two models under two plans, in changing phases: every bit is that of the same loop without plans, and nothing is left."""
    job = tiny_job(**layout)
    plans = (uniform_plan(job, gather="once"), offloading(uniform_plan(job, ("activation",)), 20_000))
    for seen in pool_of(job.gpus).run(library_on_ranks.both, job, plans):
        assert seen == {"differing": [], "changed": [], "frames": 0}


@pytest.mark.parametrize("overlapped", [False, True], ids=["passes", "passes in turns"])
def test_the_steps_of_another_model_are_not_its_own(pool_of, overlapped):
    """An engine that took them for its own would recompute for the wrong micro-batch, and could not be removed meanwhile."""
    job = overlapped_job("EP2", microbatches=2) if overlapped else tiny_job(tensor=2, microbatches=2)
    plan = plan_for(job, lambda layer: ()) if overlapped else uniform_plan(job)
    for own, others in pool_of(job.gpus).run(library_on_ranks.beside_another, job, plan):
        assert own == [True, True]
        assert others == [False, False]


def test_one_model_has_one_plan(pool_of):
    [said, _] = pool_of(2).run(library_on_ranks.twice, tiny_job(tensor=2), uniform_plan(tiny_job(tensor=2)))
    two_plans, out_of_order = said
    assert "layer 1._forward_attention: found a plan that is installed already" in two_plans
    assert "schedules.forward_step" not in two_plans, "which several models share"
    assert "another replacement on top of ours" in out_of_order


CALLED = {
    "slime": (library_on_ranks.as_slime_calls, {"tensor": 2, "sequence_parallel": True}),
    "verl": (library_on_ranks.as_verl_calls, {"tensor": 2, "sequence_parallel": True}),
    "ms-swift": (library_on_ranks.as_swift_calls, {"pipeline": 2, "microbatches": 4}),
    "NeMo-RL": (library_on_ranks.as_nemo_calls, {"tensor": 2, "sequence_parallel": True}),
}


@pytest.mark.parametrize(("calls", "layout"), CALLED.values(), ids=CALLED)
def test_the_lines_of_the_page_of_hosts(pool_of, tmp_path, calls, layout):
    """Our side, called with their arguments."""
    job = tiny_job(**layout)
    save_plan(uniform_plan(job, gather="once"), tmp_path / "plan.yaml")
    assert pool_of(2).run(calls, job, str(tmp_path / "plan.yaml")) == [[], []]


def test_the_loop_is_short():
    code = library_on_ranks.PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 46
