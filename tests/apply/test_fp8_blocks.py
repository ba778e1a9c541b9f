"""FP8 with block scales under plans: Transformer Engine's own Python, its compiled extension stood in for. Not run on a GPU.

Nothing moves on from call to call: what a recomputation quantizes again is what the record had, by rows and by columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_lynx.anatomy import ATTENTION
from megatron_lynx.config.job import Job
from megatron_lynx.fp8_recipes import reduces_amaxes
from megatron_lynx.testbed.ranks import RankPool

from ..layouts import LAYOUTS
from ..long import long
from ..transparency.plans import plan_for, recomputable
from ..transparency.test_every_bit import checked
from ..transparency.trials import Trial
from . import fp8_on_ranks, on_ranks, te_on_ranks
from .test_fp8 import NORMS, STEPPED, fp8_job

WIDE: dict[str, Any] = {"hidden": 64, "ffn": 64, "layers": 2}
"""Widths that MXFP8 takes on two tensor-parallel ranks."""
GATHERED: dict[str, Any] = {"hidden": 128, "ffn": 128, "layers": 2, "seq": 128, "vocab": 128}
"""Parts of a sequence that blocks of 128 numbers come out even in."""


def blocks_job(recipe: str, layout: str, like: str = "llama", **fields: Any) -> Job:
    size = GATHERED if LAYOUTS[layout].get("sequence_parallel") else WIDE
    job: Job = fp8_job(recipe, like, **{**size, **LAYOUTS[layout], **fields})
    return job


@pytest.fixture
def pool_of(recipe: str, request: pytest.FixtureRequest) -> Callable[[int], RankPool]:
    """MXFP8 needs a Blackwell, blocks of 128 are a Hopper's."""
    pools: Callable[[int], RankPool] = request.getfixturevalue("hopper" if recipe == "blockwise" else "blackwell")
    return pools


CASES: list[Any] = [
    ("blockwise", "tp+sp", "llama"),
    ("mxfp8", "pp", "llama"),
    ("nvfp4", "tp+sp", "llama"),
    *long(("nvfp4", "pp", "gpt"), ("blockwise", "tp", "llama"), ("blockwise", "pp", "llama"), ("blockwise", "one rank", "llama")),
    *long(("mxfp8", "tp", "llama"), ("mxfp8", "tp+sp", "llama"), ("nvfp4", "tp", "gpt"), ("nvfp4", "one rank", "gpt")),
]
"""NVFP4 with dropout: gradients are rounded by random numbers of the same generator, between two forwards."""


def check(pool_of: Callable[[int], RankPool], job: Job, trial: Trial) -> None:
    everything, windows = recomputable(job), not (reduces_amaxes(job.model.fp8_recipe) and job.parallel.sequence_parallel)
    candidates = [
        plan_for(job, lambda layer: NORMS, windows=False),
        plan_for(job, lambda layer: everything, windows=windows),
        plan_for(job, lambda layer: [i for i in everything if (i in ATTENTION.names) == bool(layer % 2)], windows=windows),
    ]
    checked(pool_of, job, candidates, trial)


@pytest.mark.parametrize(("recipe", "layout", "like"), CASES)
def test_recomputed_and_mixed(pool_of, recipe, layout, like):
    check(pool_of, blocks_job(recipe, layout, like), Trial(steps=2))


PROFILED: list[Any] = [
    ("blockwise", "tp"),
    ("mxfp8", "tp"),
    ("nvfp4", "tp+sp"),
    *long(("blockwise", "tp+sp"), ("mxfp8", "tp+sp"), ("nvfp4", "tp")),
]


@pytest.mark.parametrize(("recipe", "layout"), PROFILED)
def test_the_profile_counts_what_the_layer_saves(pool_of, recipe, layout):
    """Byte for byte, scales included, and copies of weights."""
    plain = {"position": "learned", "bias": False, "attention_dropout": 0.0, "hidden_dropout": 0.0, "norm": "rmsnorm"}
    job = blocks_job(recipe, layout, "gpt", **plain)
    for seen in pool_of(job.gpus).run(te_on_ranks.saved_bytes, job):
        assert seen == te_on_ranks.predicted_bytes(job)


IN_GRADIENTS: dict[str, Any] = {"training": {"optimizer": "megatron", "ddp": True}, "compared": "weights"}
"""MXFP8's weights are gathered where gradients were."""


@pytest.mark.parametrize(("recipe", "stepped"), [("blockwise", STEPPED), ("mxfp8", IN_GRADIENTS)])
def test_weights_that_are_held_in_blocks(pool_of, recipe, stepped):
    """By columns they are made anew in every step, from what was gathered."""
    job = blocks_job(recipe, "tp", fp8={"recipe": recipe, "parameters": True}, distributed_optimizer=True)
    check(pool_of, job, Trial(steps=3, **stepped))


def test_operands_are_what_transformer_engine_reads_in_them(hopper, blackwell):
    """Its own Python casts blocks of 128 back; by rows and by columns the stand-in's GEMM takes what that gives."""
    for pool in (hopper(1), blackwell(1)):
        [worst] = pool.run(fp8_on_ranks.read_back)
        assert worst["against its own Python"] == 0
        assert 0 < worst["against the numbers"] < 0.07  # of a block's largest: three bits behind the point
        assert 0 < worst["FP4 against the numbers"] < 0.2  # between 4 and 6 nothing is nearer than 1
        assert 0 < worst["FP4, of a product over rows"] < 0.1  # both operands are turned, and the product is not


@pytest.mark.parametrize("recipe", ["nvfp4", "tensorwise"])
def test_what_reduces_an_amax_in_every_call_is_planned_on_demand(recipe) -> None:
    with pytest.raises(ValidationError, match=f"reduces an amax in every call: plan it on demand, or keep it, with fp8 {recipe}"):
        plan_for(blocks_job(recipe, "tp+sp"), lambda layer: NORMS)


def test_what_one_gather_cannot_serve_is_refused() -> None:
    job = blocks_job("blockwise", "tp+sp")
    with pytest.raises(ValidationError, match="one gather does not serve both"):
        plan_for(job, lambda layer: recomputable(job, gather=True))


def test_sizes_that_blocks_do_not_come_out_even_in() -> None:
    with pytest.raises(ValidationError, match=r"rows of a micro-batch on a rank \(16\) must be a multiple of 128"):
        blocks_job("blockwise", "tp+sp", seq=16)
    with pytest.raises(ValidationError, match=r"model.hidden \(48\) must be a multiple of 32 with model.fp8"):
        blocks_job("mxfp8", "one rank", hidden=48)
    assert blocks_job("blockwise", "one rank", hidden=48).model.hidden == 48


def test_a_recipe_that_this_transformer_engine_does_not_have(blackwell):
    """By name, before the first step."""
    job = blocks_job("nvfp4", "one rank")
    plan = plan_for(job, lambda layer: NORMS)
    [refusal] = blackwell(1).run(on_ranks.refused, job, plan, partial(fp8_on_ranks.without_recipe, name="NVFP4BlockScaling"))
    assert refusal.places == ["transformer_engine.common.recipe:NVFP4BlockScaling"]


def test_what_fp4_cannot_go_with_is_refused(blackwell):
    """One message has all: weights in FP4, a recipe of one's own, rows with a scale each."""
    job = blocks_job("nvfp4", "one rank")
    spoil = partial(fp8_on_ranks.spoiled, fp4_param=True, fp4_quantizer_factory="mine.quantizers")
    [refusal] = blackwell(1).run(on_ranks.refused, job, plan_for(job, lambda layer: NORMS), spoil)
    assert set(refusal.places) >= {"config.fp4_param", "config.fp4_quantizer_factory", "NVTE_BACKWARD_OVERRIDE"}


def test_layers_in_bf16_are_the_plans(blackwell):
    """How many stay out of FP8 is part of a plan: with another number it is refused."""
    job = blocks_job("mxfp8", "one rank")
    plan = plan_for(job, lambda layer: NORMS)
    [refusal] = blackwell(1).run(on_ranks.refused, job, plan, partial(fp8_on_ranks.ends_in_bf16, first=1, last=0))
    assert refusal.places == ["plan: model.first_in_bf16"]
