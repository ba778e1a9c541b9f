"""Bytes and FLOPs of a layer against what was published."""

from __future__ import annotations

import pytest

from megatron_lynx.anatomy import DENSE, HALVES
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.cost.recompute import recomputation_of
from megatron_lynx.kinds.planning import flops_of, half_tensors
from megatron_lynx.profiler.shape import LayerShape

GPT = Model(
    layers=1, hidden=6144, ffn=4 * 6144, heads=64, kv_groups=64, vocab=51200, seq=2048, hidden_dropout=0.1, attention_dropout=0.1
)
LLAMA2 = Model(
    layers=1,
    hidden=8192,
    ffn=28672,
    heads=64,
    kv_groups=8,
    vocab=32000,
    seq=4096,
    activation="swiglu",
    norm="rmsnorm",
    position="rope",
    bias=False,
)


def in_sbh(shape, half, recompute=()):
    """Resident bytes of a half over sbh, without the statistics of norms and attention: a few elements for each row."""
    large = [tensor for tensor in half_tensors(shape, half) if tensor.bytes >= shape.input_bytes // 16]
    unit = shape.model.seq * shape.micro * shape.model.hidden
    return (shape.input_bytes + recomputation_of(DENSE[half], large, recompute).stays_bytes) / unit


@pytest.mark.parametrize("micro", [1, 4])
def test_korthikanti_parts_of_34(micro):
    shape = LayerShape(GPT, Parallel(), micro)
    norm_input = 2
    assert in_sbh(shape, "attention") - norm_input == 11
    assert in_sbh(shape, "mlp") - norm_input == 19
    assert sum(in_sbh(shape, half) for half in HALVES) == 34


def test_korthikanti_tensor_and_sequence_parallelism():
    tensor = sum(in_sbh(LayerShape(GPT, Parallel(tensor=8), 1), half) for half in HALVES)
    sequence = sum(in_sbh(LayerShape(GPT, Parallel(tensor=8, sequence_parallel=True), 1), half) for half in HALVES)
    assert tensor == 10 + 24 / 8
    assert sequence == 34 / 8


def test_korthikanti_scores_of_the_unfused_attention():
    """5as/h: softmax's output 2, dropout's 2 and its mask 1. Eager PyTorch on a CPU: fp32 softmax 4, noise 2, output 2."""
    shape = LayerShape(GPT.model_copy(update={"attention": "unfused", "dtype": "bf16"}), Parallel(), 1)
    scores = [tensor.bytes for tensor in half_tensors(shape, "attention") if tensor.bytes >= shape.scores]
    assert sum(scores) == (4 + 2 + 2) * GPT.heads * GPT.seq**2


def test_yuan_balanced_and_none():
    """Their fork computed SiLU apart, which Megatron's fused SwiGLU does not keep."""
    theirs = LLAMA2.model_copy(update={"fusions": ("rope",), "glu_offset": False})
    shape, fused = (LayerShape(model, Parallel(tensor=8, sequence_parallel=True), 1) for model in (theirs, LLAMA2))
    groups, ffn = LLAMA2.kv_groups / LLAMA2.heads, LLAMA2.ffn / LLAMA2.hidden
    balanced = {"attention": ("input_layernorm",), "mlp": ("pre_mlp_layernorm", "activation")}
    none = 8 * sum(in_sbh(shape, half) for half in HALVES)
    assert none == pytest.approx(12 + 4 * groups + 8 * ffn)
    assert 8 * sum(in_sbh(shape, half, balanced[half]) for half in HALVES) == pytest.approx(8 + 4 * groups + 4 * ffn)
    assert 8 * sum(in_sbh(fused, half) for half in HALVES) == pytest.approx(12 + 4 * groups + 6 * ffn)


def test_flops_of_a_layer():
    """24sbh^2(1 + s/(6h)) forward: Korthikanti's 72 is three times that."""
    s, b, h = GPT.seq, 4, GPT.hidden
    assert sum(flops_of(LayerShape(GPT, Parallel(), b)).values()) == 24 * b * s * h * h + 4 * b * s * s * h
    shard = sum(flops_of(LayerShape(GPT, Parallel(tensor=8, sequence_parallel=True), b)).values())
    assert shard * 8 == 24 * b * s * h * h + 4 * b * s * s * h
