"""Tensors in FP8 with one scale each: cast, cast back, transposed.

    numbers ── x scale, cast ──> data (uint8)          scale = largest finite FP8 / amax
            └─ largest magnitude ──> amax              delayed: the quantizer's own, of earlier steps; its amax only grows here
               data ── transposed ──> columns          current: computed from these numbers, over the group where one is given

As on a Hopper, whose FP8 products take rows alone: a tensor that is used by columns carries its transpose. When scales of delayed
scaling change is Transformer Engine's own Python to say (`NVTE_UNFUSED_FP8_UPDATE`). Block scales are in `blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.instruments.transformer_engine.blocks import OF_TENSORS, in_blocks, numbers_in_blocks, quantize_blocks
from tests.instruments.transformer_engine.enums import DType

__all__ = [
    "bgrad_quantize",
    "compute_amax",
    "create_empty_quantized_tensor",
    "dequantize",
    "fp8_transpose",
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "quantize",
    "split_quantize",
]


@torch.no_grad()
def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """`tensor` in FP8: a new tensor of the quantizer's kind, or written over `output` (not where `noop` says so)."""
    if noop is not None and float(noop) != 0:
        return output
    if type(quantizer).__name__ in OF_TENSORS:
        return quantize_blocks(tensor, quantizer, output)
    numbers = tensor.detach().float()
    scale = scale_of(numbers, quantizer)
    data = cast(numbers * scale, quantizer.dtype)
    columns = fp8_transpose(data, quantizer.dtype) if quantizer.columnwise_usage else None
    if output is None:
        output = quantizer.create_tensor_from_data(data, fake_dtype=tensor.dtype, internal=quantizer.internal)
        output._data, output._transpose = data, columns
    else:
        for name, new in {"_data": data, "_transpose": columns}.items():
            put(output, name, new)
    put(output, "_scale_inv", scale.reciprocal().view_as(output._scale_inv))
    output._transpose_invalid = output._transpose is None
    return output


def split_quantize(tensor: torch.Tensor, split_sections: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
    """Rows of each of several experts, each part with its own quantizer. (How the extension allocates them is not asked for.)"""
    return [quantize(part, quantizer) for part, quantizer in zip(tensor.split(list(split_sections)), quantizers, strict=True)]


@torch.no_grad()
def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Copy each part of the rows to where it begins once all are filled up with rows of zeros."""
    output.zero_()
    padded = output.split(list(padded_input_row_list))
    for part, target in zip(input.split(list(input_row_list)), padded, strict=True):
        target[: len(part)].copy_(part)


@torch.no_grad()
def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """The way back."""
    parts = input.split(list(input_row_list))
    output.copy_(torch.cat([part[:rows] for part, rows in zip(parts, unpadded_input_row_list, strict=True)]))


def put(owner: Any, name: str, new: torch.Tensor | None) -> None:
    """Overwrite a buffer where it lies, if it is there and of use."""
    old = getattr(owner, name)
    if old is not None and new is not None and old.shape == new.shape:
        old.copy_(new)
    elif new is not None:
        setattr(owner, name, new)


def scale_of(numbers: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """The scale, a tensor of one element, that these numbers are multiplied by.

    Raises:
        NotImplementedError: the quantizer has a scale per block.
    """
    kind = type(quantizer).__name__
    amax = numbers.abs().max().view(1) if numbers.numel() else torch.zeros(1)
    if kind == "Float8Quantizer":
        if quantizer.amax.numel():  # a cast with a scale that is known needs none
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.view_as(quantizer.amax)))
        scale: torch.Tensor = quantizer.scale.detach().float().view(1).clone()
        return scale
    if kind != "Float8CurrentScalingQuantizer":
        raise NotImplementedError(f"quantize with {kind}")
    if quantizer.with_amax_reduction:
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp(torch.distributed.ReduceOp.MAX)
        quantizer.amax_reduction_group.allreduce([amax], options).wait()  # as in C++: no name of torch's Python is looked up
    largest = torch.finfo(DType(int(quantizer.dtype)).of_torch).max
    return scale_of_amax(amax, largest, powers=quantizer.force_pow_2_scales, epsilon=quantizer.amax_epsilon)


@torch.no_grad()
def compute_amax(tensor: torch.Tensor, amax: torch.Tensor) -> None:
    """The largest magnitude of a tensor, written over `amax`. Of none it is left as it was."""
    if tensor.numel():
        amax.copy_(tensor.float().abs().max().view_as(amax))


def scale_of_amax(amax: torch.Tensor, largest: float, *, powers: bool, epsilon: float) -> torch.Tensor:
    """By what numbers are multiplied whose largest magnitude is `amax`, so that it becomes `largest`; 1 where all are 0.
    `powers`: of two alone."""
    scale = largest / (amax := amax.clamp(min=epsilon))
    scale = torch.where(torch.isfinite(scale) & torch.isfinite(amax), scale, torch.ones_like(scale))
    return torch.exp2(torch.floor(torch.log2(scale))) if powers else scale


def cast(numbers: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Rounded to FP8, what is too large to the largest; as bytes."""
    float8 = DType(int(dtype)).of_torch
    largest = torch.finfo(float8).max
    return numbers.clamp(-largest, largest).to(float8).view(torch.uint8)


def fp8_transpose(input: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Bytes (..., k) as (k, ...)."""
    columns = input.movedim(-1, 0).contiguous()
    return columns if out is None or out.shape != columns.shape else out.copy_(columns)


def dequantize(input: Any, otype: Any) -> torch.Tensor:
    """The numbers that an FP8 tensor stands for."""
    if in_blocks(input):
        return numbers_in_blocks(input, columns=input._rowwise_data is None).to(DType(int(otype)).of_torch)
    return numbers_of(input._data, input).to(DType(int(otype)).of_torch)


def numbers_of(data: torch.Tensor, tensor: Any) -> torch.Tensor:
    values: torch.Tensor = data.view(DType(int(tensor._fp8_dtype)).of_torch).float() * tensor._scale_inv
    return values


def operand(tensor: Any, transposed: bool) -> torch.Tensor:
    """A product's operand (fp32), read as a Hopper would: `transposed`, from the columns, which must be there.

    Raises:
        RuntimeError: they are not.
    """
    if in_blocks(tensor):
        return numbers_in_blocks(tensor, columns=transposed)
    data = tensor._transpose if transposed else tensor._data
    if data is None or (transposed and tensor._transpose_invalid):
        raise RuntimeError(f"an FP8 operand has no {'columns' if transposed else 'rows'}")
    numbers = numbers_of(data, tensor)
    return numbers.movedim(0, -1) if transposed else numbers


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    """(gradient of a bias, the gradient that it is summed from in FP8)"""
    return input.detach().float().flatten(0, -2).sum(0).to(input.dtype), quantizer(input)


def create_empty_quantized_tensor(quantizer: Any, shape: Any, dtype: torch.dtype, device: Any, pin_memory: bool) -> Any:
    """A tensor of the quantizer's kind, without numbers."""
    return quantize(torch.zeros(*shape, dtype=dtype), quantizer)
