"""DeepSeek-V3.2's sparse attention is read, priced from its sizes, and planned item by item."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError, Infeasible
from megatron_lynx.kinds.dense.section import ROTARY
from megatron_lynx.kinds.latent.section import CORE, SparseSizes
from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.plan.plan_file import dump_plan, load_plan
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import rehearse
from tests.uniform import uniform_plan

LAUNCH = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 128 --kv-channels 128 --vocab-size 129280 --swiglu --disable-bias-linear --normalization RMSNorm
    --seq-length 4096 --max-position-embeddings 4096 --multi-latent-attention --qk-layernorm --q-lora-rank 1536
    --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rope-type yarn --position-embedding-type rope
    --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer --hidden-dropout 0 --attention-dropout 0
    --experimental-attention-variant dsa --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
    --dsa-indexer-loss-coeff 0.01 --dsa-indexer-use-sparse-loss --dsa-kernel-backend cudnn
    --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64"""
"""Four dense layers of DeepSeek-V3.2."""


def job(more: str = "", **changes: Any) -> Job:
    reading = read_launch(shlex.split(f"{LAUNCH} {more}"), gpus=8)
    assert reading.given.unknown == ()
    return job_of(reading, "h100-80g", changes)


def test_its_flags_are_read() -> None:
    latent = job().model.latent
    assert latent is not None
    assert latent.sparse == SparseSizes(heads=64, head_size=128, keys=2048, loss="selected", fused=True)


def test_its_core_takes_what_its_kernels_take() -> None:
    """FlashMLA's sparse prefill reaches 640 TFLOP/s on an H800, whose matrix units are an H100's."""
    seen = job("--dsa-indexer-loss-coeff 0")
    tokens, keys = LayerShape.of(seen).tokens, 2048 - 2048**2 / (2 * 4096)
    core_s = analytic_profile(seen).attention.items[CORE.name].forward_s
    assert 0.3 * 640e12 < tokens * keys * 2 * 128 * (576 + 512) / core_s < 640e12  # with indexer and products
    trained_s = analytic_profile(job()).attention.items[CORE.name].forward_s
    assert core_s < trained_s


def test_long_sequences_take_less_than_with_all_keys() -> None:
    long = "--seq-length 65536 --max-position-embeddings 65536"
    sparse = analytic_profile(job(long)).attention.items[CORE.name]
    usual = analytic_profile(job(f"{long} --multi-latent-attention", **{"model.latent.sparse": None})).attention.items
    dense = usual["core_attention"]
    assert sparse.forward_s + sparse.backward_s < 0.5 * (dense.forward_s + dense.backward_s)


def test_tighter_budgets_recompute_more_of_it(tmp_path: Any) -> None:
    seen = job()
    profile = analytic_profile(seen)
    kept = rehearse(uniform_plan(seen, "none"), profile)
    recomputed = []
    for share in (0.9, 0.6, 0.3):
        tight = job(**{"budget.activation_mib": share * kept.memory(0).peak_bytes / 2**20})
        plan = make_plan(tight, profile)
        assert rehearse(plan, profile).memory(0).peak_bytes <= share * kept.memory(0).peak_bytes
        recomputed.append(plan.stages[0].rules)
    assert any(ROTARY in rule.recompute for rule in recomputed[0])
    assert all(rule.checkpoint is not None for rule in recomputed[2])
    (tmp_path / "plan.yaml").write_text(dump_plan(plan))
    assert load_plan(tmp_path / "plan.yaml") == plan


@pytest.mark.parametrize("more", ["--dsa-indexer-topk-freq 4", "--fp8-format hybrid --fp8-recipe blockwise"])
def test_a_core_that_must_not_run_again_is_kept(more: str) -> None:
    seen = job(more)
    profile = analytic_profile(seen)
    peak_bytes = rehearse(uniform_plan(seen, "none"), profile).memory(0).peak_bytes
    budgets = [job(more, **{"budget.activation_mib": share * peak_bytes / 2**20}) for share in (0.7, 0.3)]
    assert any(rule.recompute for stage in make_plan(budgets[0], profile).stages for rule in stage.rules)
    with pytest.raises(Infeasible):  # a checkpoint would fit
        make_plan(budgets[1], profile)


def test_what_it_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel: found false, needed true"):
        uniform_plan(job("--tensor-model-parallel-size 2"))
    with pytest.raises(ConfigError, match="latent needs implementation transformer_engine, found local"):
        uniform_plan(job("--transformer-impl local"))
