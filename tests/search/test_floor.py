"""Floors: of stock policies the closed form but for copies, and messages in 1F1B; of plans no more than that."""

from __future__ import annotations

import pytest

from megatron_lynx.cost.step import step_seconds
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.search.floor import STOCK, LayerCost
from megatron_lynx.search.simulated import in_steady_state, pipeline_s
from megatron_lynx.search.space import Space
from tests.config.jobs import catalogued_job
from tests.search.jobs import small_job


@pytest.mark.parametrize(("model", "cluster"), [("llama-7b", "a800-80g"), ("gpt-22b", "a100-80g-pcie")])
def test_a_floor_is_the_closed_form_as_far_as_it_goes(model: str, cluster: str) -> None:
    for job in list(Space(small_job(model, cluster, batch=8), 8))[::5]:
        cost = LayerCost.of(job)
        for policy in STOCK:
            own = job.model_copy(update={"policy": policy})
            profile = analytic_profile(job)
            step = step_seconds(own, profile.model_copy(update={"host_time": None}))
            assert step.total_s <= step_seconds(own, profile).total_s, "the host may only make it longer"
            spent = cost.floor(own).with_update(step.update_s)
            if job.chunks > 1 or job.parallel.pipeline == 1:
                assert spent.total_s == pytest.approx(step.total_s, rel=1e-9)
            else:
                assert 0.9 * step.total_s < spent.total_s <= step.total_s * (1 + 1e-9)
            assert spent.bubble_s == pytest.approx(step.bubble_s, rel=1e-9)
            assert cost.floor(own.model_copy(update={"policy": "planned"})).total_s <= cost.floor(own).total_s


@pytest.mark.parametrize("partition", [(2, 2, 3, 1), (3, 2, 2, 1), (1, 3, 3, 1)])
def test_a_floor_of_stages_that_differ_is_no_more_than_the_closed_form(partition: tuple[int, ...]) -> None:
    """A last stage that has a large head has fewer layers: priced with the mean of layers, it took more than any stage does."""
    small = small_job(batch=8)
    parallel = small.parallel.model_copy(update={"tensor": 2, "pipeline": 4, "partition": partition})
    model = small.model.model_copy(update={"vocab": 1_000_000})
    job = small.model_copy(update={"gpus": 8, "parallel": parallel, "model": model})
    profile = analytic_profile(job)
    step, cost = step_seconds(job, profile.model_copy(update={"host_time": None})), LayerCost.of(job)
    spent = cost.floor(job).with_update(step.update_s)
    assert 0.9 * step.total_s < spent.total_s <= step.total_s * (1 + 1e-9)
    assert spent.bubble_s == pytest.approx(step.bubble_s, rel=1e-9)
    assert cost.slowest_s(job) == pytest.approx(step.pipeline_s / job.microbatches, rel=1e-9)


@pytest.mark.parametrize("layout", [(2, 4, None), (2, 4, 2), (1, 8, 1)], ids=["1F1B", "interleaved", "a layer a chunk"])
@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_a_full_pipeline_goes_on_as_it_began(
    layout: tuple[int, int, int | None], ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that nothing hides pile up from the start, too."""
    tensor, pipeline, chunk = layout
    parallel = {"tensor": tensor, "pipeline": pipeline, "layers_per_chunk": chunk, "sequence_parallel": tensor > 1}
    job = catalogued_job("llama-7b", "a800-80g", gpus=8, batch=72, seq=4096, parallel=parallel, policy="none")
    profile = analytic_profile(job)
    microbatches, asked = job.microbatches, []

    def of(count: int) -> float:
        asked.append(count)
        batch = job.batch.model_copy(update={"global_": count * job.replicas})
        return pipeline_s(job.model_copy(update={"batch": batch}), profile, ratio)

    monkeypatch.setattr("megatron_lynx.search.simulated.in_steady_state", lambda step_s, count, pipeline: step_s(count))
    assert in_steady_state(of, microbatches, pipeline) == pytest.approx(of(microbatches), rel=1e-9)
    assert asked == [2 * pipeline, 3 * pipeline, microbatches]
