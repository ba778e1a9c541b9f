"""Sizes in FP8 and FP4: saved inputs of linears, copies of weights, and bytes moved by casts.

    bf16 ──cast──┬─> rowwise, a byte each ──> forward's GEMM, then dropped; or kept if it is gathered again
                 └─> columnwise, a byte each ──> kept for the weight-gradient GEMM

    scales    delayed, tensorwise    one per tensor
              blockwise              fp32, per 128 values of an activation, per 128 x 128 of a weight
              mxfp8                  a byte per 32 values
              nvfp4                  a byte per 16 values of half a byte each, and one fp32 per direction
Hopper's GEMMs read both operands rowwise, so columnwise data is a transposed copy, made by the cast, or by a separate kernel from
gathered bytes. Block scales differ by direction, so both directions are cast from bf16 on any GPU.

Source: Transformer Engine's `Linear`, `LayerNormLinear`, `get_weight_workspace` and quantizers, 2.9 to 2.20. Block scales and
Blackwell's layout were read, not run.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.fp8_recipes import PER_TENSOR, STORED, Recipe

BF16_BYTES, FP8_BYTES, SCALE_BYTES = 2, 1, 4
BLOCK, MX_BLOCK, NV_BLOCK = (STORED[recipe].block or 1 for recipe in ("blockwise", "mxfp8", "nvfp4"))


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def cast_bytes(recipe: Recipe, count: int) -> int:
    """Return the bytes of `count` values in one direction, as gathered and read. FP8 scales, at most 3 %, are left out; FP4's are
    not."""
    stored = STORED[recipe]
    return count * stored.bits // 8 + (count // NV_BLOCK if stored.bits < 8 else 0)


def buffer_bytes(recipe: Recipe, count: int) -> int:
    return count * STORED[recipe].bits // 8


def saved_bytes(recipe: Recipe, rows: int, columns: int) -> int:
    """Return the bytes of one linear's saved input with its scales, in one direction."""
    if recipe in PER_TENSOR:
        scales = SCALE_BYTES
    elif recipe == "mxfp8":
        scales = up(-(-rows // MX_BLOCK), 4) * up(columns, 128)
    elif recipe == "nvfp4":
        scales = up(columns, 128) * up(-(-rows // NV_BLOCK), 4) + SCALE_BYTES
    else:
        scales = SCALE_BYTES * -(-rows // BLOCK) * up(columns, 4)
    return buffer_bytes(recipe, rows * columns) + scales


def normed_bytes(recipe: Recipe, rows: int, columns: int, *, gathered: bool) -> int:
    """Return the saved bytes of a linear with a fused norm. `gathered`: by sequence parallelism. FP4 then keeps both directions,
    though only one is gathered again (`LayerNormLinear`, 2.9 to 2.20)."""
    kept = saved_bytes(recipe, rows, columns)
    by_rows = saved_bytes(recipe, columns, rows) - SCALE_BYTES if gathered and recipe == "nvfp4" else 0
    return kept + by_rows


def weight_bytes(recipe: Recipe, rows: int, columns: int, *, transposes: bool, held: bool = False) -> int:
    """Return the bytes that a linear stores besides its weight. `transposes`: see `config.cluster.Fp8Units`. `held`: the weight
    itself is in FP8, rowwise; else these are its copies."""
    count = rows * columns
    if held and STORED[recipe].held_in_buffer:
        return weight_bytes(recipe, rows, columns, transposes=transposes) - buffer_bytes(recipe, count)
    if recipe in PER_TENSOR:
        return (2 if transposes else 1) * FP8_BYTES * count + SCALE_BYTES
    if recipe == "mxfp8":
        by_rows = up(rows, 128) * up(-(-columns // MX_BLOCK), 4)
        by_columns = up(-(-rows // MX_BLOCK), 4) * up(columns, 128)
        return 2 * FP8_BYTES * count + by_rows + by_columns
    if recipe == "nvfp4":
        return saved_bytes(recipe, rows, columns) + saved_bytes(recipe, columns, rows)
    across, down = -(-columns // BLOCK), -(-rows // BLOCK)
    return 2 * FP8_BYTES * count + SCALE_BYTES * (down * up(across, 4) + across * up(down, 4))


@dataclass(frozen=True)
class Casts:
    """Cost of casts as (bytes moved, kernels)."""

    recipe: Recipe
    transposes: bool

    def of(self, count: int, *, both: bool) -> tuple[int, int]:
        """Return the cost of casting bf16 values. `both`: also columnwise, for which FP4 uses a separate, transposing kernel."""
        searched = STORED[self.recipe].searched  # for the maximum, in a separate kernel
        copies = 2 if both and (self.transposes or self.recipe not in PER_TENSOR) else 1
        reads = copies if self.recipe == "nvfp4" else 1
        return (searched + reads) * BF16_BYTES * count + copies * cast_bytes(self.recipe, count), searched + reads

    def gathered(self, count: int) -> int:
        """Return the bytes moved on a rank for gathered FP8 weights: a full cast, or columnwise copies."""
        if not STORED[self.recipe].held_in_buffer:
            return self.of(count, both=True)[0]
        return 2 * cast_bytes(self.recipe, count) if self.transposes or self.recipe not in PER_TENSOR else 0

    def transposed(self, count: int) -> tuple[int, int]:
        """Return the cost of transposing gathered rowwise FP8 data."""
        needed = self.transposes and self.recipe in PER_TENSOR
        return (2 * FP8_BYTES * count, 1) if needed else (0, 0)

    def of_norm(self, count: int, *, both: bool) -> tuple[int, int]:
        """Return a norm's cost beyond writing bf16. With delayed scaling its own kernel writes FP8, which moves less."""
        if self.recipe != "delayed":
            return self.of(count, both=both)
        moved, kernels = self.transposed(count) if both else (0, 0)
        return moved - (BF16_BYTES - FP8_BYTES) * count, kernels
