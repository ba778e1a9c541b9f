"""Sizes of one layer on one rank, the input of every kind's formulas.

Letters: s sequence, b micro-batch, h hidden, d head size, a heads, g key/value groups, t tensor-parallel size, c context-parallel
size. A rank has s/c rows of each sequence; norms, dropouts and residuals s/(tc) under sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lynx.config.cluster import OrderedAttention
from megatron_lynx.config.job import Job, Lengths
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.profiler.quantized import cast_bytes

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
    """Cost of deterministic fused attention on these devices."""
    lengths: Lengths | None = None
    """Lengths of packed sequences. Default: one sequence of the model's length."""

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
        """Mean query-key pairs of all layers, relative to one causal sequence."""
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
        """Whether every operator saves its own tensors, as in eager PyTorch."""
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
        """Bytes per element of a gradient added to an fp32 buffer: on a CPU it is first copied to fp32."""
        element = self.model.element_bytes
        return element + (FP32_BYTES if self.device == "cpu" and element < FP32_BYTES else 0)

    @property
    def input_bytes(self) -> int:
        """Input of a half: the residual stream."""
        return self.own_tokens * self.model.hidden * self.model.element_bytes

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


def logits_bytes(shape: LayerShape) -> int:
    return FP32_BYTES * shape.tokens * shape.model.vocab // shape.parallel.tensor
