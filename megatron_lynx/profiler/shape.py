"""Sizes of one layer on one rank, the input of every kind's formulas.

Letters: s sequence, b micro-batch, h hidden, d head size, a heads, g key/value groups, t tensor-parallel size, c context-parallel
size. A rank has s/c rows of each sequence; norms, dropouts and residuals s/(tc) under sequence parallelism.

In FP8 and FP4, a linear's input is cast; sizes of saved inputs, of copies of weights, and of bytes that casts move:

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
from typing import Literal

from megatron_lynx.config.cluster import OrderedAttention
from megatron_lynx.config.job import Job, Lengths
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
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
    if recipe in ("mxfp8", "nvfp4"):  # in both directions, with scales alike for weights and activations
        return saved_bytes(recipe, rows, columns) + saved_bytes(recipe, columns, rows)
    across, down = -(-columns // BLOCK), -(-rows // BLOCK)
    return 2 * FP8_BYTES * count + SCALE_BYTES * (down * up(across, 4) + across * up(down, 4))


@dataclass(frozen=True)
class Casts:
    recipe: Recipe
    transposes: bool

    def of(self, count: int, *, columnwise: bool) -> tuple[int, int]:
        """Return the cost of casting bf16 values. `columnwise`: that way too, which takes FP4 a second, transposing kernel."""
        searched = STORED[self.recipe].searched  # for the maximum, in a separate kernel
        copies = 2 if columnwise and (self.transposes or self.recipe not in PER_TENSOR) else 1
        reads = copies if self.recipe == "nvfp4" else 1
        return (searched + reads) * BF16_BYTES * count + copies * cast_bytes(self.recipe, count), searched + reads

    def gathered(self, count: int) -> int:
        """Return the bytes moved on a rank for gathered FP8 weights: a full cast, or columnwise copies."""
        if not STORED[self.recipe].held_in_buffer:
            return self.of(count, columnwise=True)[0]
        return 2 * cast_bytes(self.recipe, count) if self.transposes or self.recipe not in PER_TENSOR else 0

    def transposed(self, count: int) -> tuple[int, int]:
        needed = self.transposes and self.recipe in PER_TENSOR
        return (2 * FP8_BYTES * count, 1) if needed else (0, 0)

    def of_norm(self, count: int, *, columnwise: bool) -> tuple[int, int]:
        """Return a norm's cost beyond writing bf16. With delayed scaling its own kernel writes FP8, which moves less."""
        if self.recipe != "delayed":
            return self.of(count, columnwise=columnwise)
        moved, kernels = self.transposed(count) if columnwise else (0, 0)
        return moved - (BF16_BYTES - FP8_BYTES) * count, kernels


FP32_BYTES = 4
MASK_BYTES = 1
"""Bytes per element of a dropout mask on CUDA."""


@dataclass(frozen=True)
class LayerShape:
    model: Model
    parallel: Parallel
    micro: int
    device: Literal["cpu", "cuda"] = "cpu"
    """Selects, with `model.attention`, the kernels and their saved tensors: see `kinds.saved`."""
    ordered: OrderedAttention | None = None
    lengths: Lengths | None = None

    @classmethod
    def of(cls, job: Job) -> LayerShape:
        """Return a job's layer shape. Jobs that differ only in their pipeline have equal ones."""
        given = job.parallel
        layout = Parallel(tensor=given.tensor, context=given.context, sequence_parallel=given.sequence_parallel)
        if given.context > 1 and given.context_exchange != "p2p":
            exchange = {"context_exchange": given.context_exchange, "context_levels": given.context_levels}
            layout = layout.model_copy(update=exchange)
        if job.model.experts is not None:
            layout = layout.model_copy(update={"expert": given.expert, "expert_tensor": given.expert_tensor})
        ordered = job.cluster.ordered_attention if job.model.deterministic and job.model.attention == "flash" else None
        return cls(job.model, layout, job.batch.micro, job.cluster.device, ordered, job.batch.lengths)

    @property
    def seen(self) -> float:
        packed = 1.0 if self.lengths is None else self.lengths.seen(self.model.seq)
        return min(packed, self.model.seen)

    @property
    def tokens(self) -> int:
        """Rows of the linear layers."""
        return self.model.seq // self.parallel.context * self.micro

    @property
    def own_tokens(self) -> int:
        """Rows of norms, dropouts and residuals."""
        return self.tokens // self.parallel.tensor if self.parallel.sequence_parallel else self.tokens

    @property
    def query_width(self) -> int:
        return self.model.query_width // self.parallel.tensor

    @property
    def key_width(self) -> int:
        return self.model.kv_groups * self.model.head_size // self.parallel.tensor

    @property
    def qkv_width(self) -> int:
        return self.model.qkv_width // self.parallel.tensor

    @property
    def ffn(self) -> int:
        return self.model.ffn // self.parallel.tensor

    @property
    def fc1_width(self) -> int:
        return self.model.fc1_width // self.parallel.tensor

    @property
    def scores(self) -> int:
        return self.tokens * self.model.heads // self.parallel.tensor * self.model.seq

    @property
    def eager(self) -> bool:
        return self.model.attention == "unfused" and self.device == "cpu" and not self.model.uses_te

    @property
    def activation_apart(self) -> bool:
        """Whether every operator of the MLP's activation saves its own tensors."""
        return self.eager or not self.model.fuses_activation

    @property
    def sums_apart(self) -> bool:
        """Whether the sum with the bias, or the output of eager ReLU, is a separate saved block instead of the GEMM's output."""
        squared = self.eager and self.model.activation == "squared_relu"
        return self.activation_apart and (self.model.bias or squared)

    @property
    def gates_apart(self) -> int:
        """Blocks that a gated activation saves besides its input: the activation of one half, its clamped values, and the other
        half plus its offset."""
        if not self.model.gated or not self.activation_apart:
            return 0
        return 1 + self.model.glu_offset + self.model.activation_clamped

    @property
    def added_gradient_bytes(self) -> int:
        """Bytes per element of a gradient added to an fp32 buffer: on a CPU it is first copied to fp32. 0 for frozen weights;
        adapters are small."""
        if self.model.adapters is not None:
            return 0
        element = self.model.element_bytes
        return element + (FP32_BYTES if self.device == "cpu" and element < FP32_BYTES else 0)

    @property
    def input_bytes(self) -> int:
        return self.own_tokens * self.model.hidden * self.model.element_bytes

    @property
    def keeps_gradient_blocks(self) -> bool:
        """Whether Transformer Engine keeps a dummy gradient block for each weight shape (`get_dummy_wgrad`)."""
        return self.model.uses_te and self.device == "cuda" and self.model.adapters is None

    @property
    def gathered_bytes(self) -> int:
        """Residual stream on all rows: bytes of a tensor-parallel collective."""
        return self.tokens * self.model.hidden * self.model.element_bytes

    @property
    def gathered_input_bytes(self) -> int:
        """Gathered input of a column-parallel linear on all rows, after its cast with FP8."""
        if self.model.fp8_recipe is None:
            return self.gathered_bytes
        return cast_bytes(self.model.fp8_recipe, self.tokens * self.model.hidden)


def embedding_bytes(shape: LayerShape) -> int:
    size = shape.model.element_bytes if shape.eager else MASK_BYTES
    return size * shape.own_tokens * shape.model.hidden if shape.model.hidden_dropout else 0


def head_bytes(shape: LayerShape) -> int:
    """Return the input bytes of the final norm and the output projection."""
    return 2 * shape.input_bytes
