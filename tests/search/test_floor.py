"""Floors: of stock policies no more than the simulated step; of plans no more than that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from megatron_lynx.config import Job
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.search.best_first import STOCK, LayerCost
from megatron_lynx.simulator.simulation import Simulation, period_of
from megatron_lynx.stock import NONE, OF_POLICY, priced
from tests.config.jobs import catalogued_job
from tests.search.jobs import jobs_of, small_job


def simulated_s(job: Job) -> float:
    return priced(job, analytic_profile(job), OF_POLICY[job.policy]).step_s


@pytest.mark.parametrize(("model", "cluster"), [("llama-7b", "a800-80g"), ("gpt-22b", "a100-80g-pcie")])
def test_a_floor_is_a_bit_less_than_the_simulated_step(model: str, cluster: str) -> None:
    for job in list(jobs_of(small_job(model, cluster, batch=8), 8))[::5]:
        cost = LayerCost.of(job)
        stages_s = cost.stages_s(job)
        for policy in STOCK:
            own = job.model_copy(update={"policy": policy})
            assert 0.85 * simulated_s(own) < cost.floor_s(own, stages_s) <= simulated_s(own) * (1 + 1e-9)
            assert cost.floor_s(own.model_copy(update={"policy": "planned"}), stages_s) <= cost.floor_s(own, stages_s)


@pytest.mark.parametrize("partition", [(2, 2, 3, 1), (3, 2, 2, 1), (1, 3, 3, 1)])
def test_a_floor_of_stages_that_differ_is_no_more_than_the_simulated_step(partition: tuple[int, ...]) -> None:
    """A last stage that has a large head has fewer layers: priced with the mean of layers, it took more than any stage does."""
    small = small_job(batch=8)
    parallel = small.parallel.model_copy(update={"tensor": 2, "pipeline": 4, "partition": partition})
    model = small.model.model_copy(update={"vocab": 1_000_000})
    job = small.model_copy(update={"gpus": 8, "parallel": parallel, "model": model, "policy": "none"})
    cost, price = LayerCost.of(job), priced(job, analytic_profile(job), NONE)
    assert 0.85 * simulated_s(job) < cost.floor_s(job, cost.stages_s(job)) <= simulated_s(job) * (1 + 1e-9)
    assert max(cost.stages_s(job)) == pytest.approx(max(price.microbatch_s(stage).both_s for stage in range(4)), rel=1e-9)


@pytest.mark.parametrize("layout", [(2, 4, None), (2, 4, 2), (1, 8, 1), (8, 1, None)], ids=["1F1B", "v4", "v2", "one stage"])
def test_a_full_pipeline_goes_on_as_it_began(layout: tuple[int, int, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, pipeline, chunk = layout
    parallel = {"tensor": tensor, "pipeline": pipeline, "layers_per_chunk": chunk, "sequence_parallel": tensor > 1}
    job = catalogued_job("llama-7b", "a800-80g", gpus=8, batch=72, seq=4096, parallel=parallel, policy="none")
    profile, groups = analytic_profile(job), []
    monkeypatch.setattr("megatron_lynx.simulator.simulation.period_of", noting(period_of, groups))
    few_s = priced(job, profile, NONE).step_s
    assert set(groups) == {pipeline}
    assert few_s == pytest.approx(in_full(monkeypatch, lambda: priced(job, profile, NONE).step_s), rel=1e-9)


def test_chunks_that_differ_find_their_pace_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A story: DeepSeek-V3 with one layer in its last chunk and four in the others seemed 1.1 % faster under stock than it is:
    its second and third group of micro-batches took equally long, later ones longer."""
    parallel = {"pipeline": 4, "partition": (4, 4, 4, 4, 4, 4, 4, 1), "distributed_optimizer": True}
    job = catalogued_job("llama-7b", "a800-80g", gpus=4, batch=256, seq=4096, parallel={}, policy="none")
    data = job.model_dump(mode="json", by_alias=True)
    data["model"] |= {"layers": 29, "vocab": 128_000}
    job = Job.model_validate(data | {"parallel": parallel})
    profile, groups = analytic_profile(job), []
    monkeypatch.setattr("megatron_lynx.simulator.simulation.period_of", noting(period_of, groups))
    few_s = priced(job, profile, NONE).step_s
    assert len(groups) > 1
    assert few_s == pytest.approx(in_full(monkeypatch, lambda: priced(job, profile, NONE).step_s), rel=1e-9)


Found = Callable[[Simulation, Sequence[range], int], float | None]


def noting(found: Found, groups: list[int]) -> Found:
    def noted(simulation: Simulation, places: Sequence[range], group: int) -> float | None:
        groups.append(group)
        return found(simulation, places, group)

    return noted


def in_full(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> float:
    """What it is where all micro-batches are simulated."""
    monkeypatch.setattr("megatron_lynx.simulator.simulation.FEWEST_GROUPS", 10**6)
    return seconds()
