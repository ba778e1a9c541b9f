"""Cuts delayed weight gradients into pieces that fill a wait each.

    a linear               piece i of k    rows [i n / k, (i + 1) n / k) of its weight, which are contiguous in `main_grad`
    grouped experts        piece i of k    the GEMMs of experts [i n / k, (i + 1) n / k), unchanged
    experts one by one     piece i of k    the same

An element of a block of rows is one sum over the same tokens, but a GEMM of another shape may add in another order. So each shape
is computed whole and in blocks before training, on drawn operands. One that differs in any bit stays whole, and so do operands of
other shapes than these.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.errors import Problem

log = logging.getLogger(__name__)

Gemm = Callable[[Tensor, Tensor, Tensor], Any]
"""Adds the weight gradient of an input and of its output's gradient to a `main_grad`, or to rows of it."""
Shape = tuple[int, int, int, int]
"""(tokens, inputs, outputs, pieces)."""

ONE_KERNEL = "NVTE_USE_CUTLASS_GROUPED_GEMM"
"""With it one kernel computes the GEMMs of all experts."""
TODO = "leave weight_gradient_pieces out for it"


def parts(count: int, pieces: int) -> list[slice]:
    """Consecutive parts of `count` rows or experts, of nearly equal size."""
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    return list(map(slice, bounds, bounds[1:]))


def in_rows(gemm: Gemm, given: Tensor, gradient: Tensor, out: Tensor, rows: slice) -> None:
    gemm(given, gradient[:, rows].contiguous(), out[rows])


@dataclass(frozen=True)
class Cutter:
    """Cuts the linears of one rank. `equal`: whether a shape in pieces is equal to the whole in every bit."""

    equal: dict[Shape, bool] = field(default_factory=dict)

    def prove(self, gemm: Gemm, weight: Tensor, tokens: int, pieces: int) -> None:
        """Compare the weight gradient of a shape whole and in blocks of rows. `weight`: has the `main_grad`."""
        outputs, inputs = weight.shape
        if (shape := (tokens, inputs, outputs, pieces)) in self.equal:
            return
        generator = torch.Generator(weight.device).manual_seed(0)

        def drawn(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(rows, columns, dtype=dtype, device=weight.device, generator=generator)

        given, gradient = drawn(tokens, inputs, weight.dtype), drawn(tokens, outputs, weight.dtype)
        whole = drawn(outputs, inputs, weight.main_grad.dtype)  # type: ignore[attr-defined]
        blocks = whole.clone()
        gemm(given, gradient, whole)
        for rows in parts(outputs, pieces):
            in_rows(gemm, given, gradient, blocks, rows)
        self.equal[shape] = torch.equal(whole, blocks)

    def say_whole(self) -> None:
        """Log the shapes that stay whole, if any."""
        differing = [shape for shape, equal in self.equal.items() if not equal]
        if differing:
            shapes = ", ".join(f"{outputs} x {inputs} in {pieces}" for _, inputs, outputs, pieces in differing)
            log.warning("weight gradients stay whole, because their pieces differ in bits on this device: %s", shapes)

    def cut(
        self, gemm: Gemm, operands: tuple[Tensor, Tensor], out: Tensor, pieces: int
    ) -> dict[int, Callable[[], object]] | None:
        """The pieces of a weight gradient, or None if it stays whole."""
        given, gradient = (operand.flatten(0, -2) for operand in operands)
        if not self.equal.get((*given.shape, gradient.shape[-1], pieces), False):
            return None
        blocks = enumerate(parts(len(out), pieces))
        return {piece: partial(in_rows, gemm, given, gradient, out, rows) for piece, rows in blocks}


def te_gemm(weight_gradient: Callable[..., Any]) -> tuple[Gemm, Tensor]:
    """Return Transformer Engine's GEMM with the arguments of a linear's backward, and its output."""
    how: Mapping[str, Any] = inspect.getclosurevars(weight_gradient).nonlocals["wgrad_gemm_kwargs"]
    gemm = weight_gradient.__globals__["general_gemm"]
    return lambda given, gradient, out: gemm(given, gradient, **{**how, "out": out}), how["out"]


def te_gemm_alone() -> Gemm:
    """Return Transformer Engine's GEMM, as a linear in 16 bits calls it."""
    from transformer_engine.pytorch.module import linear

    module: Any = linear
    needs_workspace = "workspace" in inspect.signature(module.general_gemm).parameters

    def gemm(given: Tensor, gradient: Tensor, out: Tensor) -> None:
        how = {"workspace": module.get_workspace()} if needs_workspace else {}
        module.general_gemm(given, gradient, **how, out_dtype=out.dtype, accumulate=True, layout="NT", out=out, grad=True)

    return gemm


def refused_pieces(place: str, module: Any, experts: int, pieces: int, *, fp8: bool) -> Iterator[Problem]:
    """Why a linear's weight gradient cannot be cut. `experts`: of this rank, if the linear is theirs, else 0."""
    if pieces == 1:
        return
    where, found = f"plan: weight_gradient_pieces of {place}", f"{pieces} pieces"
    if experts:
        if experts < pieces:
            yield Problem(where, found, f"at most {experts}, a rank's experts", "plan fewer pieces")
        if os.environ.get(ONE_KERNEL, "0") != "0":
            yield Problem(where, found, f"a GEMM for each expert, so {ONE_KERNEL} unset", TODO)
    elif fp8:
        yield Problem(where, found, "operands in 16 or 32 bits: FP8 scales are of whole operands", TODO)
    elif getattr(module, "apply_bias", False) and not getattr(module, "gemm_bias_unfused_add", True):
        yield Problem(where, found, "a GEMM of its own: this one makes the bias gradient, too", TODO)
