"""FP8 with block scales under plans: Transformer Engine's own Python, its compiled extension stood in for. Not run on a GPU.

Nothing moves on from call to call: what a replay quantizes again is what the record had, by rows and by columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_lynx.anatomy import ATTENTION
from megatron_lynx.config.job import Job
from megatron_lynx.fp8_recipes import STORED
from megatron_lynx.testbed.ranks import RankPool

from ..layouts import LAYOUTS
from ..long import long
from ..transparency.plans import plan_for, replayable
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
    pools: Callable[[int], RankPool] = request.getfixturevalue("blackwell" if recipe == "mxfp8" else "hopper")
    return pools


CASES: list[Any] = [
    ("blockwise", "tp+sp"),
    ("mxfp8", "pp"),
    *long(("blockwise", "tp"), ("blockwise", "pp"), ("blockwise", "one rank"), ("mxfp8", "tp"), ("mxfp8", "tp+sp")),
]


def check(pool_of: Callable[[int], RankPool], job: Job, trial: Trial) -> None:
    everything = replayable(job)
    candidates = [
        plan_for(job, lambda layer: NORMS, windows=False),
        plan_for(job, lambda layer: everything),
        plan_for(job, lambda layer: [item for item in everything if (item in ATTENTION.names) == bool(layer % 2)]),
    ]
    checked(pool_of, job, candidates, trial)


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_replayed_and_mixed(pool_of, recipe, layout):
    check(pool_of, blocks_job(recipe, layout), Trial(steps=2))


PROFILED: list[Any] = [("blockwise", "tp"), ("mxfp8", "tp"), *long(("blockwise", "tp+sp"), ("mxfp8", "tp+sp"))]


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


def test_what_one_gather_cannot_serve_is_refused() -> None:
    job = blocks_job("blockwise", "tp+sp")
    with pytest.raises(ValidationError, match="one gather does not serve both"):
        plan_for(job, lambda layer: replayable(job, gather=True))


def test_sizes_that_blocks_do_not_come_out_even_in() -> None:
    with pytest.raises(ValidationError, match=r"rows of a micro-batch on a rank \(16\) must be a multiple of 128"):
        blocks_job("blockwise", "tp+sp", seq=16)
    with pytest.raises(ValidationError, match=r"model.hidden \(48\) must be a multiple of 32 with model.fp8"):
        blocks_job("mxfp8", "one rank", hidden=48)
    assert blocks_job("blockwise", "one rank", hidden=48).model.hidden == 48


def test_a_recipe_that_this_transformer_engine_does_not_have(hopper):
    """By name, before the first step."""
    job = blocks_job("blockwise", "one rank")
    plan = plan_for(job, lambda layer: NORMS)
    [refusal] = hopper(1).run(on_ranks.refused, job, plan, fp8_on_ranks.without_block_scales)
    assert refusal.places == ["config.fp8_recipe"]
    assert STORED["blockwise"].made_by in str(refusal.error)
