"""The stand-in answers rightly if stock Megatron agrees with itself: recomputation reproduces every bit, dropout included."""

from __future__ import annotations

import math

import pytest
import torch

from tests.tiny_jobs import tiny_job

from ..long import long, with_models
from . import on_ranks

STOCK = [
    {},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
]
LAYOUTS = [
    {},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"pipeline": 2, "microbatches": 3},
    {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
]


def name(layout):
    return layout if isinstance(layout, str) else "-".join(f"{key}{value}" for key, value in layout.items()) or "one-rank"


@with_models(LAYOUTS, (LAYOUTS[-1],), ids=name)
def test_stock_recomputation_changes_no_bit(pool_of, like, layout):
    job = tiny_job(like, **layout)
    for rank, (none, *others) in enumerate(pool_of(job.gpus).run(on_ranks.train, job, STOCK)):
        assert all(gradient.isfinite().all() and gradient.any() for gradient in none.gradients[1].values())
        assert len(none.losses) == (2 * job.microbatches if rank >= job.gpus - job.parallel.tensor else 0)
        assert [other.equals(none) for other in others] == [True] * 3


def test_dropout_is_on_in_training_and_off_in_evaluation(pool_of):
    """Guards the test above: with dropout silently off, agreement would say nothing about random numbers."""
    with_dropout, without = tiny_job("gpt"), tiny_job("gpt", attention_dropout=0.0, hidden_dropout=0.0)
    [[dropped]] = pool_of(1).run(on_ranks.train, with_dropout, [{"num_layers": 4}])
    [[plain]] = pool_of(1).run(on_ranks.train, without, [{"num_layers": 4}])
    assert not torch.equal(dropped.losses[0], plain.losses[0])
    [[again]] = pool_of(1).run(on_ranks.train, with_dropout, [{}])
    assert again.equals(dropped)


@pytest.mark.parametrize("like", ["gpt", "llama"])
def test_layouts_are_one_model(pool_of, like):
    """Weights are drawn by global name, so without dropout every layout computes the same loss, up to rounding."""
    losses = []
    for layout in [*LAYOUTS, {"pipeline": 2, "partition": (3, 1)}, {"pipeline": 2, "layers_per_chunk": 1}]:
        job = tiny_job(like, attention_dropout=0.0, hidden_dropout=0.0, **{**layout, "microbatches": 2})
        losses.append(torch.stack(pool_of(job.gpus).run(on_ranks.first_losses, job)[-1]))
    assert losses[0][0] == pytest.approx(math.log(64), rel=0.1)
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0])


def test_pipeline_messages_one_by_one_and_batched(pool_of):
    [(batched, single), *_] = pool_of(2).run(
        on_ranks.train, tiny_job(pipeline=2), [{"batch_p2p_comm": True}, {"batch_p2p_comm": False}]
    )
    assert single.equals(batched)


def test_bf16_and_query_key_norms(pool_of):
    job = tiny_job("llama", tensor=2, sequence_parallel=True, dtype="bf16")
    for none, full in pool_of(2).run(on_ranks.train, job, [{**setting, "qk_layernorm": True} for setting in STOCK[:2]]):
        assert full.equals(none)
        assert {parameter.dtype for parameter in none.parameters[0].values()} == {torch.bfloat16}


def test_training_in_a_second_thread(pool_of):
    """Nothing of the stand-in is thread-local (rule R12)."""
    [[here, there]] = pool_of(1).run(on_ranks.train_in_thread, tiny_job())
    assert there.equals(here)


@pytest.mark.parametrize("dtype", [*long("fp32"), "bf16"])
def test_fused_gradients_with_overlap_and_distributed_optimizer(pool_of, dtype):
    """Two replicas: the fused path adds into `main_grad` itself, and reduction starts while backward runs (rule R11)."""
    job = tiny_job(replicas=2, distributed_optimizer=True, microbatches=3, dtype=dtype, tied_embeddings=False)
    fused = {"gradient_accumulation_fusion": True}
    optimizer = {"optimizer": "megatron"}
    cases = [({}, optimizer), (fused, optimizer), (fused, {**optimizer, "overlap_grad_reduce": True})]
    ranks = pool_of(2).run(on_ranks.train_with_ddp, job, cases)
    for plain, fused_run, overlapped in ranks:
        assert not on_ranks.same(plain.parameters[0], plain.parameters[1])
        # A rank's gradients outside its own shard are not reduced, and overlap cuts other shards: the rest is comparable.
        assert on_ranks.same(overlapped.parameters, fused_run.parameters)
        assert on_ranks.same(overlapped.losses, fused_run.losses)
        if dtype == "fp32":  # in bf16 the fused product is added without being rounded first
            assert fused_run.equals(plain)
    assert on_ranks.same(ranks[0][2].parameters, ranks[1][2].parameters)


def test_an_installed_extension_is_not_called_without_a_gpu(pool_of):
    """Apex's is built for GPUs; a comparison on CPU ranks of a machine that has it raised."""
    assert pool_of(1).run(on_ranks.fused_gradients_beside_an_installed_extension, tiny_job()) == [(True, True)]


def test_ddp_gives_the_gradients_of_plain_training(pool_of):
    job = tiny_job(tensor=2, sequence_parallel=True)
    [[plain], [other]] = pool_of(2).run(on_ranks.train, job, [{}])
    [[wrapped], _] = pool_of(2).run(on_ranks.train_with_ddp, job, [({}, {"optimizer": "sgd"})])
    assert on_ranks.same(wrapped.gradients[0], plain.gradients[0])
    norms = [key for key in plain.gradients[0] if "layernorm" in key]
    assert len(norms) == 18
    assert all(torch.equal(plain.gradients[0][key], other.gradients[0][key]) for key in norms)


def test_experts_train_behind_those_of_a_smaller_model(pool_of):
    """Megatron's table of auxiliary losses has as many rows as the first model that ranks train has layers."""
    experts = {"count": 4, "per_token": 2, "ffn": 32}
    for layers in (2, 4):
        [[run]] = pool_of(1).run(on_ranks.train, tiny_job("llama", layers=layers, experts=experts), [{}])
        assert all(loss.isfinite() for loss in run.losses)
