"""What latent attention keeps, and how many FLOPs it has, by its shape: byte by byte what a real layer of megatron-core keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.config import load_job
from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import parameter_tensors, stage_parameters
from megatron_lynx.cost.recompute import sensible_choices
from megatron_lynx.kinds.dense.section import CORE_ATTENTION, ROTARY
from megatron_lynx.kinds.planning import flops_of, half_tensors
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.plan_file import load_plan, save_plan
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.te_releases import pools_with
from tests.tiny_jobs import tiny_job

SIZES = {"q_rank": 12, "kv_rank": 8, "head_size": 8, "rope_size": 4, "value_head_size": 6}
DIRECT = {name: size for name, size in SIZES.items() if name != "q_rank"}
TE = {"implementation": "transformer_engine"}
JOBS = {
    "in bf16": tiny_job("gpt", latent=SIZES, dtype="bf16", micro=1, **TE),
    "in fp32": tiny_job("gpt", latent=SIZES, **TE),
    "normed": tiny_job("gpt", latent=SIZES, qk_norm=True, **TE),
    "fused": tiny_job("gpt", latent=SIZES | {"fused_rotary": True}, qk_norm=True, **TE),
    "queries as they are, fused": tiny_job("llama", kv_groups=4, latent=DIRECT | {"fused_rotary": True}, **TE),
    "RMSNorm in bf16": tiny_job("llama", kv_groups=4, latent=DIRECT, qk_norm=True, dtype="bf16", **TE),
    "queries as they are": tiny_job("llama", kv_groups=4, latent=DIRECT, **TE),
}


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    yield from pools_with("2.9")


def measured(rank: int, job: Job) -> tuple[tuple[SavedTensor, ...], dict[str, int]]:
    """The blocks of one attention half on a rank, and the elements of its linears' weights."""
    import torch

    from megatron_lynx.apply.hooks.sites import places_of
    from megatron_lynx.profiler.measured import blocks_of
    from megatron_lynx.profiler.timing import HalfRun
    from megatron_lynx.testbed.profiling import inner_norms
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model

    initialise(job)
    chunk = build_model(job)[0]
    layer = getattr(chunk, "module", chunk).decoder.layers[0]
    hidden = torch.randn(job.model.seq, job.batch.micro, job.model.hidden, dtype=next(layer.parameters()).dtype)
    section = job.model.kind_sections(experts=False)[0]
    places = places_of(section, layer, te=True)
    run = HalfRun(section, getattr(layer, section.method), {"attention_mask": None}, hidden, places, inner_norms(layer, section))
    return blocks_of(run)[0], {place.item.name: place.owner.weight.numel() for place in places if place.item.is_linear}


def counted(job: Job, tensors: tuple[SavedTensor, ...]) -> Counter[Any]:
    """What comes before the core attention: its kernels are stood in for."""
    names = job.model.kind_sections(experts=False)[0].names
    before = names[: names.index(CORE_ATTENTION)]
    return Counter((one.made_by, one.saved_by, one.bytes) for one in tensors if one.made_by in before)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_a_real_layer_keeps_what_its_shape_says(pool_of: Callable[[int], RankPool], job: Job) -> None:
    [(tensors, weights)] = pool_of(1).run(measured, job)
    shape = LayerShape(job.model, job.parallel, job.batch.micro)
    assert counted(job, tensors) == counted(job, half_tensors(shape, "attention"))
    flops, section = flops_of(shape), job.model.kind_sections(experts=False)[0]
    assert {item: flops[item] for item in section.linears} == {item: 2 * shape.tokens * weights[item] for item in weights}


@pytest.mark.parametrize(("exchange", "made_by"), [("p2p", (ROTARY, CORE_ATTENTION)), ("all_gather", (ROTARY, ROTARY))])
def test_cut_sequences_keep_what_the_exchange_leaves(exchange: Any, made_by: tuple[str, str]) -> None:
    """Around a ring the keys and values that came last, which no recomputation makes; values are narrower than keys, as they
    travel."""
    query, keys = made_by
    job = tiny_job("llama", kv_groups=4, latent=SIZES, context=2, context_exchange=exchange, **TE)
    shape = LayerShape(job.model, job.parallel, job.batch.micro)
    kept = [(one.made_by, one.bytes) for one in half_tensors(shape, "attention") if one.saved_by == (CORE_ATTENTION,)]
    one = shape.tokens * 4 * 4  # bytes of a column of every head
    assert shape.tokens == job.model.seq * job.batch.micro // 2
    assert kept[:3] == [(query, one * 12), (keys, one * 12), (keys, one * 6)]


def parameters_of(rank: int, job: Job) -> tuple[int, int]:
    """How many parameters a real model has, and as how many tensors."""
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model

    initialise(job)
    sizes = [parameter.numel() for chunk in build_model(job) for parameter in chunk.parameters()]
    return sum(sizes), len(sizes)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_a_real_model_has_as_many_parameters(pool_of: Callable[[int], RankPool], job: Job) -> None:
    [found] = pool_of(1).run(parameters_of, job)
    assert found == (stage_parameters(job, 0).total, parameter_tensors(job, 0).total)


@pytest.mark.parametrize(
    ("model", "parameters"), [("deepseek-v2-lite", 15_706_484_224), ("deepseek-v3", 671_026_419_200 - 58 * 256)]
)
def test_published_models_have_the_parameters_of_their_checkpoints(model: str, parameters: int, tmp_path: Path) -> None:
    """As Hugging Face counts them; of DeepSeek-V3 less its experts' biases, which Megatron does not train as parameters."""
    (tmp_path / "job.yaml").write_text(
        f"model: {{like: models/{model}, implementation: transformer_engine}}\ncluster: clusters/h100-80g\ngpus: 1\n"
        "batch: {micro: 1, global: 1}\n"
    )
    assert stage_parameters(load_job(tmp_path / "job.yaml"), 0).total == parameters


def test_a_plan_lets_go_of_heads_first_and_is_simulated(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite on two stages: heads are made again behind waits, in plans that state the sizes."""
    (tmp_path / "job.yaml").write_text(
        "model: {like: models/deepseek-v2-lite, implementation: transformer_engine, experts: null}\ncluster: clusters/h800-80g\n"
        "gpus: 4\nparallel: {tensor: 2, sequence_parallel: true, pipeline: 2, partition: auto, distributed_optimizer: true}\n"
        "batch: {micro: 4, global: 64}\nbudget: {activation_mib: 12000}\n"
    )
    job = load_job(tmp_path / "job.yaml")
    plan = make_plan(job, analytic_profile(job))
    assert plan.model.latent_attention == job.model.latent
    recomputations = {item for stage in plan.stages for rule in stage.rules for item in rule.recompute}
    assert {"linear_kv_up_proj", "rotary"} <= recomputations
    assert "linear_q_proj" not in recomputations  # it would gather the residual stream
    assert load_plan(write(plan, tmp_path)) == plan
    assert plan.stages[0].predicted.hidden_recompute_s > 0


def write(plan: Plan, folder: Path) -> Path:
    save_plan(plan, folder / "plan.yaml")
    return folder / "plan.yaml"


def test_sets_of_items_are_few_and_begin_with_none() -> None:
    """Hundreds of sets can be made again; of those that hold as much, one is enough. Solvers count on the first keeping all."""
    job = tiny_job("gpt", latent=SIZES, qk_norm=True)
    section, tensors = job.model.kind_sections(experts=False)[0], half_tensors(LayerShape.of(job), "attention")
    chosen = list(sensible_choices(section, tensors))
    assert chosen[0] == ()
    assert [len(each) for each in chosen] == sorted(len(each) for each in chosen)
    assert section.recomputable in chosen
    assert len(chosen) < 2 ** len(section.recomputable) / 2
