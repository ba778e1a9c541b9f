"""How much of the optimizer a plan sends to the host, where the job leaves that open: bytes against bytes, at their prices."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_lynx.config import Job, load_job
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import Infeasible
from megatron_lynx.planner import Decision, decide, left_open
from megatron_lynx.planner import decision as deciding
from megatron_lynx.planner.left_open import EIGHTHS
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.solver.stages import Stages
from tests.config.jobs import catalogued_job

LAYOUT = {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "distributed_optimizer": True}
OPEN = {"precision_aware": True, "offload": "auto", "overlap_copies": True}


@cache
def job_of(memory_gib: float, batch: int = 32):
    fields = {"gpus": 8, "batch": batch, "parallel": LAYOUT, "optimizer": OPEN, "policy": "planned", "seq": 8192}
    return catalogued_job("llama3-8b", "h100-80g", budget={"memory_gib": memory_gib}, **fields)


def seconds(decision: Decision) -> float:
    return decision.simulation.step_s + update_s(decision.job, analytic_profile(decision.job))


def test_nothing_goes_where_everything_fits() -> None:
    decision = decide(job_of(70), analytic_profile(job_of(70)))
    assert decision.job.optimizer.offload == 0
    assert decision.plan.provenance.job == job_of(70).digest, "the job that was asked, which leaves it open"


@pytest.mark.slow
def test_where_recomputations_cannot_spare_enough_some_of_the_optimizer_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan fits with all of it on the device; the answer is the fastest of the few shares that were tried, and fits."""
    job, made = job_of(25), dict[float, Decision | None]()
    partitioning, finishing = deciding.partitioned, deciding.finished

    def trying(own: Job, profile: Profile) -> list[Stages]:
        made[own.optimizer.offloaded] = None
        return partitioning(own, profile)

    def remembering(found: Decision, below_s: float) -> Decision:
        made[found.job.optimizer.offloaded] = finishing(found)
        return finishing(found, below_s)

    monkeypatch.setattr(deciding, "partitioned", trying)
    monkeypatch.setattr(deciding, "finished", remembering)
    decision = decide(job, analytic_profile(job))
    assert made[0.0] is None, "infeasible"
    assert {*EIGHTHS} == {*made}
    found = [each for each in made.values() if each is not None]
    assert seconds(decision) == min(map(seconds, found)) < max(map(seconds, found))
    assert 0 < decision.job.optimizer.offloaded <= 1
    assert all(memory.total <= job.memory_budget_bytes for memory in decision.memory)


def test_where_not_even_all_of_it_is_enough_that_is_said() -> None:
    with pytest.raises(Infeasible) as refusal:
        decide(job_of(8), analytic_profile(job_of(8)))
    assert "optimizer" not in refusal.value.problems[0].finding, "all of it is on the host then"


def test_a_share_with_which_the_optimizer_cannot_be_built_is_none_that_fits() -> None:
    """Llama 3 70B on half of an H100: with an eighth, layers fit, but not whole parameters beside their copies before the first
    step. The planner said that it had made an error."""
    job = load_job("jobs/llama3-70b-h100-80g", {"budget.memory_gib": 40, "policy": "planned", "optimizer": OPEN})
    decision = decide(job, analytic_profile(job))
    assert decision.job.optimizer.offload > 0.25
    assert decision.memory_bytes <= job.memory_budget_bytes
    with pytest.raises(Infeasible, match=r"memory of a device, stage 0: found at least 46\.81 GiB"):
        decide(left_open.with_share(job, 0.125), analytic_profile(job))
