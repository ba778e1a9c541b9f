"""The parts that stand in for Transformer Engine's compiled extension compute what torch does, and leave no trace behind."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_lynx.testbed.cpu_device import stand_in_for_cuda
from tests.instruments.transformer_engine import (
    device,
    extension,
    float8,
    gemm,
    multi_tensor,
    normalization,
    softmax,
    stand_in_for_transformer_engine,
)
from tests.instruments.transformer_engine.enums import DType

FP32 = DType.kFloat32


@pytest.fixture(autouse=True)
def numbers():
    torch.manual_seed(3)


def product(A, trans_a, B, trans_b, D=None, *, bias=None, gelu_in=None, gelu=False, grad=False, accumulate=False, dtype=None):
    args = (bias, FP32, gelu, gelu_in, grad, torch.empty(0), 0, accumulate, False)
    return gemm.generic_gemm(A, trans_a, B, trans_b, D, None, dtype, *args)


def test_products_are_those_of_a_linear_layer_and_its_backward():
    x, weight, bias, dy = torch.randn(5, 2, 3), torch.randn(4, 3), torch.randn(4), torch.randn(5, 2, 4)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    y = torch.nn.functional.linear(*leaves)
    dx, dweight, dbias = torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close(product(weight, True, x, False, bias=bias)[0], y.detach())
    torch.testing.assert_close(product(weight, False, dy, False)[0], dx)
    found, found_dbias, *_ = product(x, False, dy, True, bias=bias, grad=True)
    torch.testing.assert_close(found, dweight)
    torch.testing.assert_close(found_dbias, dbias)


def test_a_weight_gradient_is_added_where_it_lies_and_is_not_rounded_before():
    x, dy = torch.randn(64, 8).bfloat16(), torch.randn(64, 4).bfloat16()
    main_grad = torch.randn(4, 8)
    expected = main_grad + dy.float().t() @ x.float()
    found, *_ = product(x, False, dy, True, main_grad, accumulate=True, dtype=FP32)
    assert found is main_grad
    torch.testing.assert_close(main_grad, expected)


def test_gelu_is_applied_after_the_bias_and_its_input_is_handed_out():
    x, weight, bias = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4)
    out, _, before, _ = product(weight, True, x, False, bias=bias, gelu=True)
    torch.testing.assert_close(before, torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(out, torch.nn.functional.gelu(before, approximate="tanh"))


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_are_torchs(kind, zero_centered):
    x, gamma, beta, dz = (torch.randn(*shape, requires_grad=True) for shape in ((6, 8), (8,), (8,), (6, 8)))
    gain = gamma + 1 if zero_centered else gamma
    if kind == "layernorm":
        leaves, expected = [x, gamma, beta], torch.nn.functional.layer_norm(x, (8,), gain, beta, 1e-5)
        found, mu, rsigma = normalization.layernorm_fwd(x, gamma, beta, 1e-5, None, None, FP32, 0, zero_centered)
        gradients = normalization.layernorm_bwd(dz, x, mu, rsigma, gamma, 0, zero_centered)
    else:
        leaves, expected = [x, gamma], torch.nn.functional.rms_norm(x, (8,), gain, 1e-5)
        found, _, rsigma = normalization.rmsnorm_fwd(x, gamma, 1e-5, None, None, FP32, 0, zero_centered)
        gradients = normalization.rmsnorm_bwd(dz, x, rsigma, gamma, 0, zero_centered)
    torch.testing.assert_close(found, expected.detach())
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, leaves, dz), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_softmax_is_causal_and_its_backward_is_torchs():
    scores = torch.randn(2, 4, 4, requires_grad=True)
    later = torch.ones(4, 4, dtype=torch.bool).triu(1)
    expected = (scores * 0.5).masked_fill(later, float("-inf")).softmax(-1)
    found = softmax.scaled_upper_triang_masked_softmax_forward(scores.detach(), 0.5)
    torch.testing.assert_close(found, expected.detach())
    dy = torch.randn(2, 4, 4)
    ours = softmax.scaled_upper_triang_masked_softmax_backward(dy, found, 0.5)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, scores, dy)[0])


def test_adam_is_torchs():
    weight, gradient = torch.nn.Parameter(torch.randn(8)), torch.randn(8)
    ours, moments = weight.detach().clone(), [torch.zeros(8), torch.zeros(8)]
    adam = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.01)
    for step in (1, 2):
        weight.grad = gradient * step
        adam.step()
        lists = [[gradient * step], [ours], *([moment] for moment in moments)]
        multi_tensor.multi_tensor_adam(0, torch.zeros(1), lists, 0.1, 0.9, 0.99, 1e-8, step, 1, 1, 0.01)
    torch.testing.assert_close(ours, weight.detach())


def test_fp8_keeps_the_largest_number_and_the_history_grows_only():
    """Delayed scaling: the scale is the quantizer's, and what is found of the numbers is only noted."""

    def made(data, fake_dtype, internal):
        return SimpleNamespace(_scale_inv=torch.ones(1), _fp8_dtype=DType.kFloat8E4M3, fake_dtype=fake_dtype)

    class Float8Quantizer(SimpleNamespace):
        dtype, internal, columnwise_usage = DType.kFloat8E4M3, False, True
        create_tensor_from_data = staticmethod(made)

    quantizer = Float8Quantizer(scale=torch.tensor([2.0]), amax=torch.tensor([5.0]))
    numbers = torch.tensor([[1.0, -2.0, 448.0]])
    tensor = float8.quantize(numbers, quantizer)
    assert quantizer.amax.item() == 448
    assert float8.dequantize(tensor, FP32).tolist() == [[1.0, -2.0, 224.0]]  # 448 is the largest; it was scaled by 2
    assert float8.operand(tensor, transposed=True).tolist() == [[1.0, -2.0, 224.0]]
    float8.quantize(torch.ones(1, 3), quantizer)
    assert quantizer.amax.item() == 448
    tensor._transpose = None
    with pytest.raises(RuntimeError, match="no columns"):
        float8.operand(tensor, transposed=True)


def test_what_is_not_answered_says_so_when_it_is_called():
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.fused_attn_fwd"):
        extension.fused_attn_fwd(1)
    with pytest.raises(AttributeError):
        extension.flash_attention  # noqa: B018 (plugins look whether it is there)


def test_nothing_but_transformer_engine_takes_the_cpu_for_a_gpu(monkeypatch):
    folder = SimpleNamespace(submodule_search_locations=[])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: folder)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    before = [dict(vars(owner)) for owner in (torch.cuda, torch.Tensor, torch.cuda.nvtx)], list(sys.meta_path)
    asked = "import torch; answers = torch.ones(1).is_cuda, torch.cuda.is_available(), torch.cuda.current_device()"
    with stand_in_for_cuda(), stand_in_for_transformer_engine():
        te_module, core_module = {"__name__": "transformer_engine.pytorch.utils"}, {"__name__": "megatron.core.utils"}
        exec(asked, te_module)
        exec(asked, core_module)
        assert te_module["answers"] == (True, True, 0)
        assert core_module["answers"] == (False, False, torch.device("cpu"))
        assert not device.asked_by_transformer_engine()
    assert before == ([dict(vars(owner)) for owner in (torch.cuda, torch.Tensor, torch.cuda.nvtx)], list(sys.meta_path))
