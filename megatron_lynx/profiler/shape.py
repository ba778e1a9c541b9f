"""One layer of one rank by its shape: sizes, and the FLOPs of each item.

Letters: s sequence, b micro-batch, h hidden, d head size, a heads, g key/value groups, t tensor-parallel size, c context-parallel
size. A rank works on s/c rows of each sequence; under sequence parallelism norms, dropouts and residuals on s/(tc).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lynx.anatomy.dense import CORE_ATTENTION, ITEMS, LINEAR_FC1, LINEAR_FC2, LINEAR_PROJ, LINEAR_QKV
from megatron_lynx.config.cluster import OrderedAttention
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.profiler.quantized import FP8_BYTES


@dataclass(frozen=True)
class LayerShape:
    """One layer of one tensor-parallel rank."""

    model: Model
    parallel: Parallel
    micro: int
    device: Literal["cpu", "cuda"] = "cpu"
    """Decides with `model.attention` whose kernels save what: see `profiler.tensors`."""
    ordered: OrderedAttention | None = None
    """Of fused attention that must add up in one order, what that costs these devices."""

    @classmethod
    def of(cls, job: Job) -> LayerShape:
        """Layers of jobs that differ in their pipeline alone are equal."""
        given = job.parallel
        layout = Parallel(tensor=given.tensor, context=given.context, sequence_parallel=given.sequence_parallel)
        if given.context > 1 and given.context_exchange != "p2p":
            exchange = {"context_exchange": given.context_exchange, "context_levels": given.context_levels}
            layout = layout.model_copy(update=exchange)
        if job.model.experts is not None:
            layout = layout.model_copy(update={"expert": given.expert, "expert_tensor": given.expert_tensor})
        ordered = job.cluster.ordered_attention if job.model.deterministic and job.model.attention == "flash" else None
        return cls(job.model, layout, job.batch.micro, job.cluster.device, ordered)

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
        """Elements of the attention matrix: own queries, all keys."""
        return self.tokens * self.model.heads // self.parallel.tensor * self.model.seq

    @property
    def eager(self) -> bool:
        """Whether every operator saves for itself, as in eager PyTorch."""
        return self.model.attention == "unfused" and self.device == "cpu" and not self.model.uses_te

    @property
    def input_bytes(self) -> int:
        """The input of a half: the residual stream."""
        return self.own_tokens * self.model.hidden * self.model.element_bytes

    @property
    def gathered_bytes(self) -> int:
        """The residual stream on all rows: what a tensor-parallel collective moves."""
        return self.tokens * self.model.hidden * self.model.element_bytes

    @property
    def gathered_input_bytes(self) -> int:
        """The input of a column-parallel linear on all rows, as it is gathered: with FP8 after its cast."""
        return self.tokens * self.model.hidden * (self.model.element_bytes if self.model.fp8 is None else FP8_BYTES)


def item_flops(shape: LayerShape) -> dict[str, int]:
    """FLOPs of the GEMMs in one forward of each item (2mnk each), as torch's FlopCounterMode counts them.

    Attention is two batched GEMMs over the whole square: a causal mask saves no work in them.
    """
    hidden, tokens = shape.model.hidden, shape.tokens
    flops = dict.fromkeys(ITEMS, 0)
    flops[LINEAR_QKV] = 2 * tokens * hidden * shape.qkv_width
    flops[CORE_ATTENTION] = 2 * (2 * shape.scores * shape.model.head_size)
    flops[LINEAR_PROJ] = 2 * tokens * shape.query_width * hidden
    flops[LINEAR_FC1] = 2 * tokens * hidden * shape.fc1_width
    flops[LINEAR_FC2] = 2 * tokens * shape.ffn * hidden
    return flops
