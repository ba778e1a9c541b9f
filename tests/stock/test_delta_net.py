"""Stock's `gdn_norm_out`: the bytes that it frees and the seconds that it takes, beside a real gated delta net of 0.19."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import load_cluster
from megatron_lynx.kinds.mamba.section import GATED_NORM
from megatron_lynx.launch_arguments.today import OF_FLAGS
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.layer import layer_bytes, layer_seconds
from megatron_lynx.stock.legality import Facts, objections
from megatron_lynx.stock.rival import module_sets
from megatron_lynx.stock.setting import NONE, Fact, StockSetting
from tests.stock.on_ranks import hold
from tests.te_releases import pool_with
from tests.tiny_jobs import tiny_job
from tests.transparency.opaque_layers import SIZES, delta_net_in, delta_nets

NORM_OUT = StockSetting(recompute=("gdn_norm_out",))
VARIANT = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 1,
    "linear_conv_kernel_dim": SIZES["convolved"],
    "linear_key_head_dim": SIZES["key_size"],
    "linear_value_head_dim": SIZES["value_size"],
    "linear_num_key_heads": SIZES["key_heads"],
    "linear_num_value_heads": SIZES["value_heads"],
    "deterministic_mode": True,
}
LATENT = {"q_rank": 12, "kv_rank": 8, "head_size": 8, "rope_size": 4, "value_head_size": 6}


def job_of(layers: int = 4) -> Job:
    return tiny_job(
        "llama", layers=layers, seq=128, micro=1, microbatches=1, norm="layernorm", opaque=delta_net_in([f"1-{layers}"])
    )


def held(rank: int, jobs: list[Job], fields: list[dict[str, Any]]) -> list[list[int]]:
    counted = []
    for job in jobs:
        with delta_nets(job):
            counted += hold(rank, [job], fields, VARIANT)
    return counted


def test_a_gated_norm_that_is_recomputed_frees_what_is_priced() -> None:
    """A launch with `gdn_norm_out` was refused as if it had no gated delta net."""
    jobs = [job_of(layers) for layers in (1, 2)]
    with pool_with("2.17", 1, core="0.19") as pool:
        few, many = pool.run(held, jobs, [NONE.fields, NORM_OUT.fields])[0]
    shape = LayerShape.of(jobs[0])
    whole, less = (layer_bytes(shape, setting, shape.model.sections(1)) for setting in (NONE, NORM_OUT))
    priced = whole[0].stays - less[0].stays
    result = 4 * shape.tokens * SIZES["value_heads"] * SIZES["value_size"]
    assert priced == less[0].again > 2 * result  # the normed result, its product with the gate, and the gate's activation
    freed = (many[0] - many[1]) - (few[0] - few[1])
    states = 3 * torch.get_rng_state().nbytes
    assert freed + states == pytest.approx(priced, abs=states / 3)


def test_its_seconds_are_those_of_the_gated_norm() -> None:
    job = job_of().model_copy(update={"cluster": load_cluster("h100-80g", "test")})
    shape, profile = LayerShape.of(job), analytic_profile(job)
    kind = shape.model.sections(1)
    again_s = layer_seconds(shape, profile, NORM_OUT, kind)[0].again_s
    assert again_s == profile.of(kind[0]).items[GATED_NORM].forward_s > 0
    assert layer_seconds(shape, profile, NONE, kind)[0].again_s == 0


def test_stock_is_offered_it_where_layers_have_a_delta_net() -> None:
    assert not [*objections(NORM_OUT, Facts.of(job_of()), "config")]
    assert "gated_delta_net alone" in next(objections(NORM_OUT, Facts.of(tiny_job("llama")), "config"))
    assert NORM_OUT in set(module_sets(job_of()))


def test_every_fact_that_a_module_may_need_is_found_in_some_job_or_said_by_a_launch() -> None:
    """`gated_delta` was in the table, and set nowhere."""
    experts = {"count": 4, "per_token": 2, "ffn": 32, "shared_ffn": 32}
    jobs = (
        job_of(),
        tiny_job("gpt", latent=LATENT),
        tiny_job("llama", implementation="transformer_engine", experts=experts),
    )
    assert frozenset[str]().union(*(Facts.of(job).has for job in jobs)) | OF_FLAGS.keys() == set(get_args(Fact))
