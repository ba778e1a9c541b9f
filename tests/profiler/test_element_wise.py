"""What operations between GEMMs move, fused or not: as Megatron's own modules move it, operator by operator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lynx.anatomy import ATTENTION, MLP
from megatron_lynx.config.job import Job
from megatron_lynx.kinds.planning import half_tensors
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.roofline import (
    activation_kernels,
    clamped_kernels,
    residual_kernels,
    softmax_kernels,
    turned_kernels,
    weighted_kernels,
)
from megatron_lynx.profiler.shape import LayerShape
from tests.config.jobs import catalogued_job
from tests.profiler.counted_traffic import passes

ON_META: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
LATER = {"seq": 64, "hidden": 32, "ffn": 128, "heads": 4, "kv_groups": 4, "bias": True, "activation": "gelu", "position": "rope"}


def shape_of(**fields: Any) -> LayerShape:
    """One rank's layer of bf16; no fusion is on unless it is said."""
    job = catalogued_job("llama-7b", "a100-80g", gpus=2, batch=4, micro=2, parallel={"tensor": 1})
    model = job.model.model_copy(update={**LATER, "fusions": (), **fields})
    return LayerShape.of(job.model_copy(update={"model": model}))


def tensor(*sizes: int) -> torch.Tensor:
    return torch.empty(*sizes, **ON_META)


@pytest.mark.parametrize(("activation", "bias"), [("gelu", True), ("gelu", False), ("swiglu", True), ("swiglu", False)])
@pytest.mark.parametrize("weighted", [False, True], ids=["mlp", "expert"])
def test_an_unfused_activation_moves_what_megatrons_operators_move(activation: str, bias: bool, weighted: bool) -> None:
    shape = shape_of(activation=activation, bias=bias)
    rows, given = shape.tokens, shape.fc1_width
    vectors = [tensor(given)] if bias else []
    weights = [tensor(rows)] if weighted else []
    counted = passes(activated(activation, len(vectors)), tensor(rows, given), *vectors, *weights)
    kernels = (weighted_kernels if weighted else activation_kernels)(shape.model, rows, shape.ffn)
    if weighted:  # the probability's gradient is a sum of the product, which `passes` leaves out
        product = 2 * rows * shape.ffn
        kernels = kernels._replace(backward=tuple(each for each in kernels.backward if each != product + 2 * rows))
    assert [sorted(each) for each in kernels] == [sorted(each) for each in counted]


def activated(activation: str, biases: int) -> Any:
    """What Megatron's MLP does between its linears, its own code."""
    from megatron.core.transformer.mlp import MLP as MegatronsMLP

    config = SimpleNamespace(
        use_te_activation_func=False,
        bias_activation_fusion=False,
        gated_linear_unit=activation == "swiglu",
        activation_func=torch.nn.functional.silu if activation == "swiglu" else torch.nn.functional.gelu,
        activation_func_clamp_value=None,
        glu_linear_offset=0.0,
    )

    def run(given: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        module = SimpleNamespace(
            config=config,
            activation_func=config.activation_func,
            linear_fc1=lambda hidden: (given, more[0] if biases else None),
            linear_fc2=lambda hidden: (hidden, None),
        )
        return MegatronsMLP.forward(module, given, *more[biases:])[0]

    return run


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_an_unfused_residual_moves_what_megatrons_operators_move(monkeypatch: Any, bias: bool, dropout: float) -> None:
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_unfused

    def as_on_a_gpu(x: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
        return torch.native_dropout(x, p, training)[0] if p else x  # what PyTorch calls there

    monkeypatch.setattr(torch.nn.functional, "dropout", as_on_a_gpu)
    shape = shape_of(bias=bias, hidden_dropout=dropout)
    rows, hidden = shape.tokens, shape.model.hidden
    vectors = [tensor(hidden)] if bias else []
    unfused = bias_dropout_add_unfused(True)
    forward, backward = passes(
        lambda x, residual, *bias: unfused((x, bias[0] if bias else None), residual, dropout),
        *(tensor(rows, hidden), tensor(rows, hidden), *vectors),
    )
    kernels = residual_kernels(shape)
    assert list(kernels.forward) == forward
    summed = 3 * 2 * rows * hidden  # with the gradient that goes round the half
    assert list(kernels.backward) == [*backward, summed]


def test_unfused_rotary_positions_move_what_megatrons_operators_move() -> None:
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    shape = shape_of(heads=8)
    size, micro, seq = shape.model.head_size, shape.micro, shape.model.seq
    for interleaved in (False, True):
        angles = torch.empty(seq, 1, 1, size, device="meta")
        forward, backward = passes(
            lambda given, angles=angles, interleaved=interleaved: _apply_rotary_pos_emb_bshd(
                given, angles, multi_latent_attention=interleaved
            ),
            tensor(seq, micro, 8, size),
        )
        kernels = turned_kernels(shape, 8 * size, size, interleaved=interleaved)
        assert sorted(kernels.forward) == sorted(forward)
        assert sorted(kernels.backward) == sorted(backward)


def test_unfused_softmax_moves_what_megatrons_operators_move() -> None:
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    shape = shape_of(implementation="local", attention="unfused")
    seq, micro = shape.model.seq, shape.micro
    softmax = FusedScaleMaskSoftmax(False, True, AttnMaskType.causal, False, attention_mask_func, False, None)
    mask = torch.empty(micro, 1, seq, seq, dtype=torch.bool, device="meta")
    forward, backward = passes(lambda scores: softmax(scores * 1, mask), tensor(micro, 4, seq, seq))
    kernels = softmax_kernels(shape)
    assert list(kernels.forward) == forward[1:], "the first makes scores that may be overwritten"
    assert list(kernels.backward) == backward[:-1]


@pytest.mark.parametrize(("seq", "heads", "kernels"), [(64, 4, 1), (4096, 4, 1), (8192, 4, 2), (16, 4, 2), (64, 1, 2)])
def test_what_megatrons_kernel_for_softmax_does_not_take_is_not_fused(seq: int, heads: int, kernels: int) -> None:
    shape = shape_of(implementation="local", attention="unfused", fusions=None, seq=seq, heads=heads, kv_groups=heads)
    assert len(softmax_kernels(shape).forward) == kernels
    assert len(softmax_kernels(shape_of(implementation="transformer_engine", attention="unfused", seq=seq)).forward) == 1


def test_fused_every_tensor_is_read_or_written_once() -> None:
    fused = shape_of(fusions=None, bias=False)
    rows, ffn = fused.tokens, fused.ffn
    assert activation_kernels(fused.model, rows, ffn) == ((2 * 2 * rows * ffn,), (3 * 2 * rows * ffn,))
    gated = shape_of(fusions=None, bias=False, activation="swiglu")
    assert activation_kernels(gated.model, rows, ffn) == ((3 * 2 * rows * ffn,), (5 * 2 * rows * ffn,))
    assert weighted_kernels(gated.model, rows, ffn) == activation_kernels(gated.model, rows, ffn)


def test_a_clamp_before_a_fused_activation_moves_what_megatrons_operators_move(monkeypatch: Any) -> None:
    """gpt-oss: both halves are clamped and joined again, outside the fused kernel."""
    from megatron.core.fusions import fused_bias_geglu

    monkeypatch.setattr(fused_bias_geglu, "WeightedQuickGeGLUFunction", SimpleNamespace(apply=lambda given, *_: given))
    shape = shape_of(activation="quick_geglu", activation_clamped=True, bias=False, fusions=None)
    rows, width = shape.tokens, shape.ffn
    counted = passes(
        lambda given: fused_bias_geglu.weighted_bias_quick_geglu_impl(given, None, tensor(rows, 1), clamp_value=7.0),
        tensor(rows, 2 * width),
    )
    kernels = clamped_kernels(shape.model, rows, width)
    without_scalars = [[size - size % 1024 for size in each if size > 1024] for each in counted]
    assert [sorted(each) for each in kernels] == [sorted(each) for each in without_scalars]
    assert sum(weighted_kernels(shape.model, rows, width).forward) == sum(counted[0]) + 3 * 2 * rows * width


FUSIONS = ("bias_dropout", "bias_activation", "rope", "masked_softmax")
MODELS: dict[str, dict[str, Any]] = {
    "gpt, local": {"implementation": "local", "attention": "unfused", "activation": "gelu", "bias": True, "hidden_dropout": 0.1},
    "llama, local": {"implementation": "local", "attention": "unfused", "activation": "swiglu", "bias": False},
    "llama, te": {"implementation": "transformer_engine", "attention": "flash", "activation": "swiglu", "bias": False},
    "squared relu": {"activation": "squared_relu", "bias": False},
}


def job_of(model: str, **fields: Any) -> Job:
    job = catalogued_job("llama-7b", "h100-80g", gpus=8, batch=8, parallel={"tensor": 2, "sequence_parallel": True})
    return job.model_copy(update={"model": job.model.model_copy(update={**MODELS[model], **fields})})


@pytest.mark.parametrize("model", MODELS)
def test_unfused_is_never_quicker_and_recomputes_take_as_much_longer(model: str) -> None:
    fused, all_off = (analytic_profile(job_of(model, fusions=on)) for on in (None, ()))
    for half in ("attention", "mlp"):
        for name, item in fused.half(half).items.items():
            apart = all_off.half(half).items[name]
            assert apart.forward_s >= item.forward_s, name
            assert apart.backward_s >= item.backward_s, name
    for off in FUSIONS:
        one_off = analytic_profile(job_of(model, fusions=tuple(each for each in FUSIONS if each != off)))
        for half in ("attention", "mlp"):
            assert fused.half(half).forward_s <= one_off.half(half).forward_s <= all_off.half(half).forward_s
            assert fused.half(half).backward_s <= one_off.half(half).backward_s <= all_off.half(half).backward_s


def test_each_fusion_is_of_its_own_items() -> None:
    changed = {}
    for off in FUSIONS:
        jobs = [job_of("gpt, local", position="rope", seq=2048, fusions=on) for on in (None, tuple({*FUSIONS} - {off}))]
        fused, apart = (analytic_profile(job) for job in jobs)
        items = [(half, name) for half in ("attention", "mlp") for name in fused.half(half).items]
        changed[off] = [name for half, name in items if fused.half(half).items[name] != apart.half(half).items[name]]
    residuals = [ATTENTION.residual, MLP.residual]
    assert {off: set(names) for off, names in changed.items()} == {
        "bias_dropout": set(residuals),
        "bias_activation": {"activation"},
        "rope": {"rotary"},
        "masked_softmax": {"core_attention"},
    }


def test_swiglu_saves_what_it_was_given_alone_where_it_is_fused() -> None:
    """It was counted with SiLU apart, as in Yuan et al., whatever the launch had on."""
    sizes = {}
    for name, more in {"fused": {"fusions": None}, "unfused": {}, "2023": {"glu_offset": False}}.items():
        shape = shape_of(activation="swiglu", bias=False, norm="rmsnorm", **more)
        one = shape.tokens * shape.ffn * 2
        sizes[name] = [tensor.bytes // one for tensor in half_tensors(shape, "mlp") if tensor.bytes >= one]
    assert sizes == {"fused": [2, 1], "unfused": [2, 1, 1, 1], "2023": [2, 1, 1]}
