"""Megatron's compiled fusions under a plan: the same bits as stock with the same fusions, and nothing is compiled for
recomputations.

`jit_fuser` is `torch.compile`. Its guards look at every argument's type, shape, strides, and whether it asks for a gradient: what
a recomputation hands to a compiled function must pass for what the record handed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from shutil import which
from typing import Any

import pytest
import torch

from megatron_lynx.testbed.ranks import RankPool
from tests.instruments.compiler import COMPILER
from tests.long import with_models
from tests.te_releases import folder_of, python_path
from tests.tiny_jobs import tiny_job
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_every_bit import checked
from tests.transparency.test_offload import chunk_bytes
from tests.transparency.trials import Seen, Trial

pytestmark = pytest.mark.streams

Pools = Callable[[int], RankPool]

FUSED = {"bias_dropout_fusion": True, "bias_activation_fusion": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2, "microbatches": 4},
}
BIAS_FOUND_IN_BACKWARD = {"gpt": ["bias_gelu_back"], "llama": []}
"""What may be compiled once more than in stock: a parameter that code between sites saves is a plain tensor in its backward."""


@pytest.fixture(scope="module")
def compiling() -> Iterator[Callable[[int], RankPool]]:
    """`pool_of`, whose ranks compile."""
    pools: dict[int, RankPool] = {}
    yield lambda ranks: pools.setdefault(ranks, RankPool(ranks, env={COMPILER: "aot_eager"}))
    for pool in pools.values():
        pool.close()


def assert_nothing_new(like: str, stock: Seen, planned: list[Seen]) -> None:
    """In stock's first step everything is compiled; by all plans together only what a saved parameter asks for, and once."""
    activation = {"gpt": "bias_gelu", "llama": "swiglu"}[like]
    assert {"bias_dropout_add_fused_train", activation, f"{activation}_back"} <= set(stock.compiled[0])
    assert stock.compiled[1:] == [[]] * (len(stock.compiled) - 1)
    new = [name for seen in planned for step in seen.compiled for name in step]
    assert new in ([], BIAS_FOUND_IN_BACKWARD[like])


@with_models(LAYOUTS, combined=["TP2"])
def test_the_same_bits_and_nothing_compiled_for_a_recomputation(compiling: Pools, layout: str, like: Any) -> None:
    """Recomputations pass geometry in place of values that they do not need. They used to pass one value expanded to the size:
    strides differed, and the compiler compiled bias-dropout-add again in the middle of a recomputation."""
    job = tiny_job(like, **LAYOUTS[layout], hidden_dropout=0.1)
    everything = recomputable(job, gather=True)
    candidates = [
        plan_for(job, lambda layer: everything),
        plan_for(job, lambda layer: ["activation", "mlp_bda", "attention_bda"][layer % 2 :]),
        plan_for(job, lambda layer: ["input_layernorm", "activation"] if layer % 2 else (), windows=False),
        offloading(plan_for(job, lambda layer: ["mlp_bda"]), int(0.63 * chunk_bytes(job))),
    ]
    for outcomes in checked(compiling, job, candidates, Trial(steps=2, model=FUSED, canaries=layout == "TP2")):
        assert_nothing_new(like, outcomes[0].stock, [outcome.planned for outcome in outcomes])


def test_another_thread_needs_nothing_compiled(compiling: Pools) -> None:
    """The compiler's guards look at the state of the thread, too. On CUDA backward runs in autograd's."""
    job = tiny_job("gpt", dtype="bf16")
    plan = plan_for(job, lambda layer: recomputable(job))
    ((outcome,),) = checked(compiling, job, [plan], Trial(steps=2, model=FUSED, backward_thread=True))
    assert_nothing_new("gpt", outcome.stock, [outcome.planned])


def test_rotary_positions_in_one_kernel() -> None:
    """It is Transformer Engine's: skipped where no release of it is unpacked. On a CPU its compiled part is stood in for."""
    folder = folder_of("TRANSFORMER_ENGINE", "2.9", "transformer_engine")
    job = tiny_job("llama", implementation="transformer_engine", hidden_dropout=0.1)
    candidates = [
        plan_for(job, lambda layer: recomputable(job)),
        offloading(plan_for(job, lambda layer: ["rotary"] if layer % 2 else ()), chunk_bytes(job)),
    ]
    trial = Trial(steps=2, model={**FUSED, "apply_rope_fusion": True})
    with RankPool(1, env={COMPILER: "aot_eager", "PYTHONPATH": python_path(folder)}) as pool:
        (outcomes,) = checked(lambda _: pool, job, candidates, trial)
        assert pool.run(turned_as_megatron_does) == [(True, True)]
    assert_nothing_new("llama", outcomes[0].stock, [outcome.planned for outcome in outcomes])


def turned_as_megatron_does(rank: int) -> tuple[bool, bool]:
    """Whether the kernel's stand-in makes what Megatron's unfused code makes, forward and backward."""
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    torch.manual_seed(3)
    heads, angles, gradient = torch.randn(5, 2, 3, 8), torch.randn(7, 1, 1, 6), torch.randn(5, 2, 3, 8)
    results = []
    for function in (fused_apply_rotary_pos_emb, _apply_rotary_pos_emb_bshd):
        start = heads.clone().requires_grad_()
        turned = function(start, angles[:5])
        turned.backward(gradient)
        results.append((turned.detach(), start.grad))
    (fused, fused_gradient), (plain, plain_gradient) = results
    return torch.allclose(fused, plain, atol=1e-6), torch.allclose(fused_gradient, plain_gradient, atol=1e-6)


@pytest.mark.skipif(not any(map(which, ("g++", "clang++"))), reason="needs a compiler of C++")
def test_masks_that_generated_code_draws() -> None:
    """C++ that torch generates draws other masks than plain code. A function that the compiler gives up, because it was compiled
    too often, is plain code: its recomputations would drop other values than the record did. (Here it gives up at the second
    time.)"""
    job = tiny_job("llama", layers=2, hidden_dropout=0.1)
    candidates = [
        plan_for(job, lambda layer: recomputable(job)),
        offloading(plan_for(job, lambda layer: ["attention_bda", "mlp_bda"]), chunk_bytes(job)),
    ]
    with RankPool(1, env={COMPILER: "inductor", "TORCHINDUCTOR_COMPILE_THREADS": "1"}) as pool:
        (outcomes,) = checked(lambda _: pool, job, candidates, Trial(steps=2, model=FUSED, recompile_limit=1))
    assert_nothing_new("llama", outcomes[0].stock, [outcome.planned for outcome in outcomes])
