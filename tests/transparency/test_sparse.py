"""Sparse attention (DeepSeek-V3.2) under plans equals stock in every bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import parameter_tensors, stage_parameters
from megatron_lynx.kinds.latent.section import CORE
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.shape import LayerShape
from tests.kinds.on_ranks import measured_sparse
from tests.long import long
from tests.te_releases import pool_with, pools_with
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import checkpointed
from tests.transparency.offloaded import offloading
from tests.transparency.sparse_layers import compare, logged_losses
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

SPARSE = {"heads": 4, "head_size": 8, "keys": 5, "loss": "all"}
SIZES = {"q_rank": 12, "kv_rank": 8, "head_size": 8, "rope_size": 4, "value_head_size": 6}
DIRECT = {**{name: size for name, size in SIZES.items() if name != "q_rank"}, "sparse": SPARSE}
TE = {"implementation": "transformer_engine"}
EXPERTS = {"count": 4, "per_token": 2, "ffn": 32, "shared_ffn": 32, "layers": [2]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "EP2": {"replicas": 2, "expert": 2, "experts": EXPERTS},
    "TP2+SP, queries as they are": {"tensor": 2, "sequence_parallel": True, "latent": DIRECT, "qk_norm": False},
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2, "microbatches": 4, "layers": 4},
    "PP2xVPP2": {"pipeline": 2, "microbatches": 4, "layers": 4, "layers_per_chunk": 1},
}


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Any]:
    yield from pools_with("2.17", core="0.19")


def test_megatron_0_20() -> None:
    job = job_of("TP2+SP")
    kept = uniform_plan(job, "none")
    candidates = [uniform_plan(job, job.model.halves["attention"].recomputable), checkpointed(kept, "layer")]
    with pool_with("2.20", 2, core="0.20") as pool:
        for outcomes in pool.run(compare, job, candidates, Trial(canaries=True)):
            assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)


def job_of(layout: str, sparse: dict[str, Any] = SPARSE, **model: Any) -> Job:
    fields = {"layers": 2, "latent": {**SIZES, "sparse": sparse}, "qk_norm": True, "bias": False, "norm": "rmsnorm"}
    return tiny_job("gpt", **{**fields, **TE, **LAYOUTS[layout], **model})


@pytest.mark.parametrize("layout", ["one rank", "TP2+SP", "PP2xVPP2", *long("EP2", "TP2+SP, queries as they are", "PP2")])
def test_every_bit(pool_of: Any, layout: str) -> None:
    job = job_of(layout)
    section, cut = job.model.halves["attention"], job.parallel.sequence_parallel
    kept, everything = uniform_plan(job, "none"), uniform_plan(job, section.recomputable_among(1, sequence_parallel=cut))
    candidates = [
        kept,
        everything,
        uniform_plan(job, ("rotary",)),
        uniform_plan(job, [item.name for item in section.items if item.role.endswith("norm")]),
        checkpointed(kept, "attention"),
        checkpointed(kept, "layer"),
        offloading(uniform_plan(job, ("input_layernorm", "rotary")), 8_000),
    ]
    if job.gpus > 1:  # single items, and checkpoints of one half, are as on one rank
        del candidates[2:5]
    for outcomes in pool_of(job.gpus).run(compare, job, candidates, Trial(canaries=True, steps=2)):
        assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)
        assert [outcome.planned.frames_left for outcome in outcomes] == [0] * len(candidates)
        assert all(outcome.planned.counts[-1].recomputed > 0 for outcome in outcomes[1:])


@pytest.mark.parametrize("recipe", ["delayed", *long("tensorwise")])
def test_items_run_again_in_fp8(pool_of: Any, recipe: str) -> None:
    sizes = {"q_rank": 32, "kv_rank": 16, "head_size": 16, "rope_size": 16, "value_head_size": 16}
    sparse = {**SPARSE, "heads": 16, "head_size": 32}
    shape = {"hidden": 64, "ffn": 128, "seq": 32, "dtype": "bf16", "fp8": {"format": "hybrid", "recipe": recipe}}
    job = job_of("one rank", latent={**sizes, "sparse": sparse}, **shape)
    candidates = [uniform_plan(job, ("input_layernorm", "rotary")), uniform_plan(job, job.model.halves["attention"].recomputable)]
    [outcomes] = pool_of(1).run(compare, job, candidates, Trial(canaries=True, steps=2))
    assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)


def test_a_recomputed_indexer_logs_its_loss_once(pool_of: Any) -> None:
    job = job_of("one rank")
    kept = uniform_plan(job, "none")
    [[stock, *planned]] = pool_of(1).run(logged_losses, job, [kept, checkpointed(kept, "attention")])
    assert min(stock) > 0
    assert planned == [stock, stock]


@pytest.mark.parametrize("sparse", [{"loss": "none"}, {"loss": "all"}, {"loss": "selected"}, {"shared": True}])
def test_other_indexers(pool_of: Any, sparse: dict[str, Any]) -> None:
    job = job_of("one rank", {**SPARSE, **sparse})
    candidates = [uniform_plan(job, ("rotary",)), uniform_plan(job, job.model.halves["attention"].recomputable)]
    [outcomes] = pool_of(1).run(compare, job, candidates, Trial(canaries=True))
    assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)


@pytest.mark.parametrize("loss", ["none", "all"])
def test_a_real_half_keeps_and_computes_what_its_shape_says(pool_of: Any, loss: str) -> None:
    job = job_of("one rank", {**SPARSE, "loss": loss}, seq=128, hidden_dropout=0.0)
    [(tensors, flops, numbers, parameters)] = pool_of(1).run(measured_sparse, job)
    shape, section = LayerShape.of(job), job.model.halves["attention"]
    face = planning_of(section)
    priced, counted = (
        Counter((one.made_by, one.saved_by, one.bytes) for one in every if one.saved_by and one.made_by != CORE.name)
        for every in (face.tensors(shape), tensors)
    )
    assert counted == priced
    inside = [sum(one.bytes for one in every if one.made_by == CORE.name) for every in (face.tensors(shape), tensors)]
    assert inside[0] == pytest.approx(inside[1], rel=0.02)
    assert {item: flops[item] for item in face.linears(shape)} == {item: face.flops(shape)[item] for item in face.linears(shape)}
    assert (numbers, parameters) == (stage_parameters(job, 0).total, parameter_tensors(job, 0).total)
