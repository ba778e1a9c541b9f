"""FP8 and FP4 by sizes: what of a linear's input stays for backward, copies of its weight, and bytes that casts move.

    bf16 ──cast──┬─> a byte each, by rows ──> forward's GEMM, then dropped; or gathered again, and kept for that
                 └─> a byte each, by columns ──> kept for the GEMM of the weight's gradient

    scales    delayed, tensorwise    one number a tensor
              blockwise              fp32, for 128 numbers of an activation, for 128 x 128 of a weight
              mxfp8                  a byte for 32 numbers
              nvfp4                  a byte for 16 numbers, which take half a byte each, and fp32 for all in each direction
A Hopper's GEMMs read both operands by rows, so what is read by columns is a transposed copy: made by the cast, or of gathered
bytes by a kernel of its own. Block scales differ by rows and by columns, so there both are made from the numbers, on any GPU.

Where it is from: Transformer Engine's `Linear`, `LayerNormLinear`, `get_weight_workspace` and quantizers, 2.9 to 2.20. Block
scales and a Blackwell's layout were read, not run.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.fp8_recipes import PER_TENSOR, STORED, Recipe

BF16_BYTES, FP8_BYTES, SCALE_BYTES = 2, 1, 4
BLOCK, MX_BLOCK, NV_BLOCK = (STORED[recipe].block or 1 for recipe in ("blockwise", "mxfp8", "nvfp4"))


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def cast_bytes(recipe: Recipe, count: int) -> int:
    """Bytes of so many numbers in one direction, as they are gathered and read. Scales of FP8 are at most 3 % of it, and left
    out; those of FP4 are not."""
    stored = STORED[recipe]
    return count * stored.bits // 8 + (count // NV_BLOCK if stored.bits < 8 else 0)


def buffer_bytes(recipe: Recipe, count: int) -> int:
    """Bytes of so many weights that are held in FP8 or FP4, by rows, as they lie in the optimizer's buffer."""
    return count * STORED[recipe].bits // 8


def saved_bytes(recipe: Recipe, rows: int, columns: int) -> int:
    """Bytes that one linear keeps of its input, with its scales: one byte each, or half a one, by rows or by columns."""
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
    """The same where a norm inside the linear makes its input. `gathered`: by sequence parallelism; of FP4 then both directions
    stay, of which one alone is gathered again (`LayerNormLinear`, 2.9 to 2.20)."""
    kept = saved_bytes(recipe, rows, columns)
    by_rows = saved_bytes(recipe, columns, rows) - SCALE_BYTES if gathered and recipe == "nvfp4" else 0
    return kept + by_rows


def weight_bytes(recipe: Recipe, rows: int, columns: int, *, transposes: bool, held: bool = False) -> int:
    """Bytes that a linear keeps beside its weight. `transposes`: see `config.cluster.Fp8Units`. `held`: its weight is in FP8
    itself, by rows; else these are copies of it."""
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
    """What casts move, and in how many kernels: (bytes, kernels)."""

    recipe: Recipe
    transposes: bool

    def of(self, count: int, *, both: bool) -> tuple[int, int]:
        """Casts bf16 numbers. `both`: by columns as well, which FP4 makes in a kernel of its own, where it turns them."""
        searched = STORED[self.recipe].searched  # for the largest, in a kernel of its own
        copies = 2 if both and (self.transposes or self.recipe not in PER_TENSOR) else 1
        reads = copies if self.recipe == "nvfp4" else 1
        return (searched + reads) * BF16_BYTES * count + copies * cast_bytes(self.recipe, count), searched + reads

    def gathered(self, count: int) -> int:
        """Bytes that weights move on a rank which are held in FP8 and have been gathered: all are cast, or copied by columns."""
        if not STORED[self.recipe].held_in_buffer:
            return self.of(count, both=True)[0]
        return 2 * cast_bytes(self.recipe, count) if self.transposes or self.recipe not in PER_TENSOR else 0

    def transposed(self, count: int) -> tuple[int, int]:
        """Copies by columns what was gathered in FP8 by rows."""
        needed = self.transposes and self.recipe in PER_TENSOR
        return (2 * FP8_BYTES * count, 1) if needed else (0, 0)

    def of_norm(self, count: int, *, both: bool) -> tuple[int, int]:
        """What a norm makes, beyond writing it in bf16: with delayed scaling its own kernel writes bytes, and less is moved."""
        if self.recipe != "delayed":
            return self.of(count, both=both)
        moved, kernels = self.transposed(count) if both else (0, 0)
        return moved - (BF16_BYTES - FP8_BYTES) * count, kernels
