"""Tensors in FP8 with a scale for each block of numbers. Those by rows and those by columns are both cast from the numbers.

                     a scale for                          data            scales                          for m x k numbers
    blocks of 128    128 numbers of a row                 m x k           k / 128  x  m, up to 4's
                     128 numbers of a column              k x m           m / 128  x  k, up to 4's
                     128 x 128 numbers (2D: weights)      as above        m / 128  x  k / 128, up to 4's; or transposed
    on their way     (`all_gather_usage`, up to 2.13)     m x k           m x k / 128, or m / 128 x k
    MXFP8            32 numbers of a row                  m x k           m, up to 128's  x  k / 32, up to 4's
                     32 numbers of a column               m x k           m / 32, up to 4's  x  k, up to 128's

Scales of blocks are fp32, of which powers of two alone are the default; those of MXFP8 are bytes, exponents of two. Scales beyond
the numbers are there to fill up, and 0.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch

from tests.instruments.transformer_engine.enums import DType, Float8BlockScaleTensorFormat
from tests.instruments.transformer_engine.fp4 import fp4_parts, in_fp4, numbers_in_fp4

__all__ = ["fp8_block_scaling_compute_partial_amax", "fp8_block_scaling_partial_cast"]

BLOCK, MX_BLOCK, MX_BIAS = 128, 32, 127
OF_TENSORS = {
    "Float8BlockQuantizer": ("float8_blockwise_tensor", "Float8BlockwiseQTensor"),
    "MXFP8Quantizer": ("mxfp8_tensor", "MXFP8Tensor"),
    "NVFP4Quantizer": ("nvfp4_tensor", "NVFP4Tensor"),
}
"""By the class of a quantizer, where that of its tensors is, below `transformer_engine.pytorch.tensor`."""


class Cut(NamedTuple):
    """Blocks of so many rows and columns, and the largest number that one is scaled to."""

    down: int
    across: int
    largest: float

    def amaxes(self, numbers: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each block."""
        m, k = numbers.shape
        padded = torch.nn.functional.pad(numbers.abs(), (0, -k % self.across, 0, -m % self.down))
        return padded.view(-(-m // self.down), self.down, -(-k // self.across), self.across).amax((1, 3))

    def spread(self, scales: torch.Tensor, m: int, k: int) -> torch.Tensor:
        """A block's scale for each of its numbers."""
        return scales.repeat_interleave(self.down, 0).repeat_interleave(self.across, 1)[:m, :k]


def in_blocks(thing: Any) -> bool:
    """Whether it is a tensor with block scales."""
    return hasattr(thing, "_rowwise_scale_inv")


@torch.no_grad()
def quantize_blocks(tensor: torch.Tensor, quantizer: Any, output: Any = None) -> Any:
    """A new tensor of the quantizer's kind, or `output` written over."""
    made = {
        name: part
        for columns, wanted in ((False, quantizer.rowwise_usage), (True, quantizer.columnwise_usage))
        if wanted
        for name, part in parts(tensor, quantizer, columns).items()
    }
    if output is None:
        return built(tensor, quantizer, made)
    for name, new in made.items():
        old = getattr(output, f"_{name}")
        if old is not None and old.shape == new.shape:
            old.copy_(new)
        else:
            setattr(output, f"_{name}", new)
    return output


def parts(tensor: torch.Tensor, quantizer: Any, columns: bool) -> dict[str, torch.Tensor]:
    """Data and scales in one direction, as they are stored."""
    if is_fp4(quantizer):
        return fp4_parts(tensor, quantizer, columns)
    numbers = tensor.detach().float().reshape(-1, tensor.shape[-1])
    cut = cut_of(quantizer, columns)
    amaxes = cut.amaxes(numbers)
    name = "columnwise" if columns else "rowwise"
    if is_mx(quantizer):
        exponents = torch.ceil(torch.log2(amaxes / cut.largest)).clamp(-MX_BIAS, MX_BIAS)
        scales, kept = torch.exp2(-exponents), filled((exponents + MX_BIAS).to(torch.uint8), *((4, 128) if columns else (128, 4)))
        turned = False
    else:
        scales = scales_of(amaxes, cut.largest, quantizer)
        kept, turned = stored(scales.reciprocal(), quantizer, columns), columns and not travels(quantizer)
    data = (numbers * cut.spread(scales, *numbers.shape)).clamp(-cut.largest, cut.largest)
    data = data.to(DType(int(quantizer.dtype)).of_torch).view(torch.uint8).view(tensor.shape)
    return {f"{name}_data": data.movedim(-1, 0).contiguous() if turned else data, f"{name}_scale_inv": kept}


def scales_of(amaxes: torch.Tensor, largest: float, quantizer: Any) -> torch.Tensor:
    scales = largest / amaxes.clamp(min=quantizer.amax_epsilon)
    scales = torch.where(torch.isfinite(scales), scales, torch.ones_like(scales))
    return torch.exp2(torch.floor(torch.log2(scales))) if quantizer.force_pow_2_scales else scales


def stored(inverses: torch.Tensor, quantizer: Any, columns: bool) -> torch.Tensor:
    """Scales of blocks of 128 as GEMMs read them, or as they travel."""
    if travels(quantizer):
        return inverses.contiguous()
    turned = columns if quantizer.block_scaling_dim == 2 else not columns
    return filled(inverses.t() if turned else inverses, 1, 4)


def filled(scales: torch.Tensor, down: int, across: int) -> torch.Tensor:
    """Up to multiples of these."""
    m, k = scales.shape
    return torch.nn.functional.pad(scales, (0, -k % across, 0, -m % down)).contiguous()


def built(tensor: torch.Tensor, quantizer: Any, made: dict[str, torch.Tensor]) -> Any:
    """A tensor of the release's own class; of the one without a shape where the quantizer makes tensors for insiders."""
    module, name = OF_TENSORS[type(quantizer).__name__]
    full = getattr(__import__(f"transformer_engine.pytorch.tensor.{module}", fromlist=[name]), name)
    storage = full.__mro__[1]
    fields: dict[str, Any] = {f"{way}_{part}": None for way in ("rowwise", "columnwise") for part in ("data", "scale_inv")}
    fields |= {"amax_rowwise": None, "amax_columnwise": None, **made}
    fields |= {"quantizer": quantizer, "fake_dtype": tensor.dtype} | dict.fromkeys(("fp8_dtype", "fp4_dtype"), quantizer.dtype)
    fields |= {"row_scaled_nvfp4": False, "nvfp4_use_4over6": False, "nvfp4_e4m3_max": 448}
    fields |= {"is_2D_scaled": getattr(quantizer, "block_scaling_dim", 1) == 2, "with_gemm_swizzled_scales": False}
    ready = Float8BlockScaleTensorFormat.COMPACT if travels(quantizer) else Float8BlockScaleTensorFormat.GEMM_READY
    known = inspect.signature(storage.__new__).parameters
    fields = {name: value for name, value in (fields | {"data_format": ready}).items() if name in known}
    return storage(**fields) if quantizer.internal else full(shape=tensor.shape, dtype=tensor.dtype, **fields)


def numbers_in_blocks(tensor: Any, columns: bool) -> torch.Tensor:
    """What a tensor stands for (fp32), read in one direction.

    Raises:
        RuntimeError: it was not stored in that direction.
    """
    if in_fp4(tensor):
        return numbers_in_fp4(tensor, columns)
    name = "_columnwise" if columns else "_rowwise"
    data, kept = getattr(tensor, f"{name}_data"), getattr(tensor, f"{name}_scale_inv")
    if data is None or kept is None:
        raise RuntimeError(f"an operand with block scales has no {'columns' if columns else 'rows'}")
    values = data.view(DType(int(tensor._fp8_dtype)).of_torch).float()
    if hasattr(tensor, "_is_2D_scaled"):
        values = values.movedim(0, -1) if columns else values
        turned = columns if tensor._is_2D_scaled else not columns
        inverses = kept.t() if turned else kept
        cut = Cut(BLOCK, BLOCK, 0) if tensor._is_2D_scaled else Cut(*((BLOCK, 1) if columns else (1, BLOCK)), 0)
    else:
        inverses, cut = torch.exp2(kept.float() - MX_BIAS), Cut(*((MX_BLOCK, 1) if columns else (1, MX_BLOCK)), 0)
    flat = values.reshape(-1, values.shape[-1])
    m, k = flat.shape
    inverses = inverses[: -(-m // cut.down), : -(-k // cut.across)]
    numbers: torch.Tensor = (flat * cut.spread(inverses, m, k)).view(values.shape)
    return numbers


def cut_of(quantizer: Any, columns: bool) -> Cut:
    size = MX_BLOCK if is_mx(quantizer) else BLOCK
    largest = torch.finfo(DType(int(quantizer.dtype)).of_torch).max
    if getattr(quantizer, "block_scaling_dim", 1) == 2:
        return Cut(size, size, largest)
    return Cut(*((size, 1) if columns else (1, size)), largest)


@torch.no_grad()
def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """The largest magnitudes of a weight's blocks of which this rank steps a part, from there on in a row; 0 elsewhere."""
    amax.zero_()
    found = Cut(block_len, block_len, 0).amaxes(whole_of(tensor, h, w, start_offset))
    amax[:, : found.shape[1]].copy_(found)


@torch.no_grad()
def fp8_block_scaling_partial_cast(
    inp: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, h: int, w: int, start_offset: int, block_len: int, out_dtype: Any
) -> None:
    """Cast this rank's part of a weight into its bytes."""
    largest = torch.finfo(DType(int(out_dtype)).of_torch).max
    cut = Cut(block_len, block_len, largest)
    scales = cut.spread(scale[:, : -(-w // block_len)], h, w).reshape(-1)[start_offset : start_offset + inp.numel()]
    numbers = (inp.float().reshape(-1) * scales).clamp(-largest, largest)
    out.copy_(numbers.to(DType(int(out_dtype)).of_torch).view(torch.uint8))


def whole_of(part: torch.Tensor, h: int, w: int, start: int) -> torch.Tensor:
    """A weight of which only this part is there; the rest is 0."""
    whole = torch.zeros(h * w)
    whole[start : start + part.numel()] = part.float().reshape(-1)
    return whole.view(h, w)


def is_mx(quantizer: Any) -> bool:
    return type(quantizer).__name__ == "MXFP8Quantizer"


def is_fp4(quantizer: Any) -> bool:
    return type(quantizer).__name__ == "NVFP4Quantizer"


def travels(quantizer: Any) -> bool:
    """Whether its tensors are for a gather, and stored as that needs them."""
    return bool(getattr(quantizer, "all_gather_usage", False)) and getattr(quantizer, "block_scaling_dim", 1) == 1
