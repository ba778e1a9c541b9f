"""A kind that exists in tests alone is priced from shapes, planned, and trained under its plan, every bit stock's.

Its folder (`tests/kinds/gated`) has its section and its face for planning; outside of it are the three lines of `registration`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator

import pytest

from megatron_lynx.anatomy import ATTENTION
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.config.model import Model
from megatron_lynx.cost.parameters import parameter_tensors, stage_parameters
from megatron_lynx.errors import ConfigError
from megatron_lynx.kinds.dense.section import LINEAR_QKV
from megatron_lynx.kinds.planning import flops_of, half_tensors
from megatron_lynx.plan.plan_file import dump_plan, load_plan
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.validation import validated
from tests.config.jobs import catalogued_job
from tests.kinds import on_ranks
from tests.kinds.gated import registration
from tests.kinds.gated.section import GATE, GATED, GATING
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

KIND = {"kinds": (GATED.name,)}


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registration.registered():
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(1) as started:
        yield started


def large(model: dict[str, object]) -> Job:
    job = catalogued_job("llama3-8b", "h100-80g", gpus=2, batch=8, parallel={"tensor": 2})
    return job.model_copy(update={"model": job.model.model_copy(update=model)})


def within(job: Job, kib: int) -> Job:
    return job.model_copy(update={"budget": Budget(activation_mib=kib / 1024)})


def test_three_lines_are_outside_of_its_folder() -> None:
    """What `registered` does before it yields, but for imports."""
    source = inspect.getsource(registration.registered)
    lines = [line.strip() for line in source.partition("try:")[0].splitlines()[2:]]
    assert len([line for line in lines if line and not line.startswith("from ")]) <= 3


@pytest.mark.parametrize("like", ["gpt", "llama"])
def test_a_real_layer_keeps_and_computes_what_its_shape_says(pool: RankPool, like: str) -> None:
    job = tiny_job(like, position="learned", **KIND)  # type: ignore[arg-type]
    [(tensors, flops, numbers, parameters)] = pool.run(on_ranks.measured, job)
    shape = LayerShape(job.model, job.parallel, job.batch.micro)

    def counted(blocks: tuple) -> Counter:  # type: ignore[type-arg]
        return Counter((one.made_by, one.saved_by, one.bytes) for one in blocks)

    assert counted(tensors) == counted(half_tensors(shape, GATED.half))
    assert {item: flops.get(item, 0) for item in GATED.names} == {item: flops_of(shape)[item] for item in GATED.names}
    assert (numbers, parameters) == (stage_parameters(job, 0).total, parameter_tensors(job, 0).total)


def test_it_is_priced_from_shapes() -> None:
    """A linear as wide as the queries, a sigmoid and a product more than the usual attention; all else is as it was."""
    usual, gated = (analytic_profile(large(model)).attention for model in ({}, KIND))
    assert gated.items[GATE.name].flops * 3 == gated.items[LINEAR_QKV].flops * 2  # Llama 3: 32 heads, 8 groups
    assert gated.items[GATING.name].forward_s > 0
    for name in ATTENTION.names:
        assert (gated.items[name].forward_s, gated.items[name].backward_s) == (
            usual.items[name].forward_s,
            usual.items[name].backward_s,
        )
    assert stage_parameters(large(KIND), 0).matrices - stage_parameters(large({}), 0).matrices == 32 * 4096**2 // 2


def test_it_is_planned_within_a_budget_and_its_plan_is_read_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    job = tiny_job("gpt", **KIND)
    profile = made_up_profile(job)
    plan = make_plan(within(job, 150), profile)
    assert {item for rule in plan.stages[0].rules for item in rule.recompute} > {GATING.name, GATE.name}
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text(dump_plan(plan))
    assert load_plan(path) == plan
    assert rehearse(plan, profile).step_s > 0


@pytest.mark.parametrize("like", ["gpt", "llama"])
def test_every_bit_under_its_plans(pool: RankPool, like: str) -> None:
    job = tiny_job(like, **KIND)  # type: ignore[arg-type]
    profile = made_up_profile(job)
    plans = [
        uniform_plan(job),
        uniform_plan(job, ("input_layernorm", GATE.name, GATING.name)),
        uniform_plan(job, (GATING.name,)),
        *(make_plan(within(job, kib), profile) for kib in (90, 150, 250)),
    ]
    assert all(GATED.name in plan.model.kinds for plan in plans)
    [outcomes] = pool.run(on_ranks.compare, job, plans, Trial(canaries=True, counted=True))
    for plan, outcome in zip(plans, outcomes, strict=True):
        assert outcome.differing == [], plan.model_dump_json()
        assert outcome.planned.frames_left == 0
        assert outcome.planned.counts[-1].recomputed > 0
        recomputed = sum(stage.predicted.recomputed_flops for stage in plan.stages if stage.predicted is not None)
        assert outcome.planned.flops - outcome.stock.flops == job.microbatches * recomputed


def test_a_plan_for_the_usual_attention_is_refused(pool: RankPool) -> None:
    job = tiny_job("gpt", **KIND)
    [said] = pool.run(on_ranks.refused, job, uniform_plan(tiny_job("gpt")))
    assert "plan: model.kinds: layers 1, 2, 3, 4" in said
    assert "gated in this run alone" in said


def test_what_it_cannot_have_is_refused_before_anything_is_planned() -> None:
    with pytest.raises(ConfigError, match="false with gated attention"):
        uniform_plan(tiny_job("gpt", tensor=2, sequence_parallel=True, **KIND))


def test_a_kind_that_nobody_registered_is_told() -> None:
    data = tiny_job("gpt").model.model_dump(mode="json") | {"kinds": ["gatd"]}
    with pytest.raises(ConfigError, match="gated"):
        validated(Model, data, "a model")
