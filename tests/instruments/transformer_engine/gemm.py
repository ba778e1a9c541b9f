"""Matrix products, with what a cuBLAS epilogue does to them.

Operands come in cuBLAS's order, columns first, so for torch's rows the product is `op(B) @ op(A)`:

    TN  forward           B = input (n, in),    A = weight (out, in)   ->  (n, out)
    NN  input gradient    B = grad (n, out),    A = weight (out, in)   ->  (n, in)
    NT  weight gradient   B = grad (n, out),    A = input (n, in)      ->  (out, in), which may be added to `D` where it lies
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.instruments.transformer_engine.enums import CommOverlapType, DType
from tests.instruments.transformer_engine.float8 import operand
from tests.instruments.transformer_engine.result import delivered, in_fp32

__all__ = ["generic_gemm", "te_general_grouped_gemm"]


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: torch.Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(product, bias gradient, GELU's input, extra output); each of the last three where asked for. With a userbuffer
    (`comm_overlap`) ranks exchange before the product or behind it."""
    scatters = comm_overlap is not None and CommOverlapType(int(comm_type)) is CommOverlapType.RS
    if comm_overlap is not None and (bulk_overlap or not scatters):
        comm_overlap.exchange(comm_type)
    left, right = numbers(B, by_columns=transB), numbers(A, by_columns=not transA)
    dtype = A.dtype if output_dtype is None else torch_type(output_dtype)
    product = product_of(left, transB, right, transA) * alpha
    bias_gradient = pre_gelu = None
    if bias is not None and grad:
        bias_gradient = left.flatten(0, -2).sum(0).to(dtype)
    elif bias is not None:
        product += bias.detach().float()
    if gelu and grad and gelu_in is not None:
        product = torch.ops.aten.gelu_backward(product, in_fp32(gelu_in), approximate="tanh")
    elif gelu:
        pre_gelu = product.to(dtype)
        product = torch.nn.functional.gelu(product, approximate="tanh")
    if accumulate and D is not None:
        product += D.detach().float() * (1.0 if beta is None else beta)
    if scatters and not bulk_overlap:
        comm_overlap.scatter(product, extra_output)
        return extra_output, bias_gradient, pre_gelu, extra_output
    return delivered(product, D, quantizer, dtype), bias_gradient, pre_gelu, extra_output


def te_general_grouped_gemm(
    A: Sequence[Any],
    transA: bool,
    B: Sequence[Any],
    transB: bool,
    D: Sequence[torch.Tensor],
    output_dtype: Any,
    m_splits: Sequence[int] | None,
    bias: Sequence[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> Sequence[torch.Tensor]:
    """One product for each pair of operands, into its own output, or into its rows of the only one. Biases are added, and with
    `grad` their gradients filled in where they lie; an empty tensor stands for none."""
    outputs = D[0].split(list(m_splits or ())) if single_output else D
    for right, left, output, one in zip(A, B, outputs, bias, strict=True):
        product = product_of(numbers(left, by_columns=transB), transB, numbers(right, by_columns=not transA), transA)
        if grad and one.numel():
            one.copy_(in_fp32(left).flatten(0, -2).sum(0))
        elif one.numel():
            product += in_fp32(one)
        if accumulate:
            product += in_fp32(output)
        delivered(product, output, None, output.dtype)
    return bias


def numbers(tensor: Any, by_columns: bool) -> torch.Tensor:
    """An operand in fp32. In FP8 it is read from the bytes that lie as the product goes through them."""
    return operand(tensor, by_columns) if hasattr(tensor, "get_metadata") else in_fp32(tensor)


def product_of(left: torch.Tensor, transpose_left: bool, right: torch.Tensor, transpose_right: bool) -> torch.Tensor:
    """`op(left) @ op(right)`; all dimensions but the last are rows, and an untransposed left operand's are given back."""
    rows = left.shape[:-1]
    left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    right = right.t() if transpose_right else right
    if transpose_left:
        return left.t() @ right
    return (left @ right).view(*rows, right.shape[1])


def torch_type(dtype: Any) -> torch.dtype:
    """Torch's name for one of Transformer Engine's types (the extension's enumeration, or its Python's, or torch's)."""
    return dtype if isinstance(dtype, torch.dtype) else DType(int(dtype)).of_torch
