"""A way to run a job that fits, and whether a job fits its devices under a policy of stock's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import least_left_bytes
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.parameters import mfu
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.units import GIB, format_bytes


@dataclass(frozen=True)
class Candidate:
    """`job` has its layout, micro-batch size and policy, and its offload ratio unless a plan decides that."""

    job: Job
    step_s: float
    """As simulated, with gradients and optimizer."""
    offload_ratio: float
    """The largest of all stages."""
    memory_bytes: int
    """Bytes on the fullest stage."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices."""
        return self.job.batch.global_ * self.job.model.seq / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, in [0, 1]; causal attention counts half."""
        matmul = self.job.cluster.matmul
        assert matmul is not None, "an analytic profile was made of it"
        return mfu(self.job.model, self.tokens_per_s, self.job.gpus * matmul.peak_flop_per_s(self.job.model.dtype))

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "parallel": self.job.parallel.model_dump(mode="json", exclude_none=True),
            "replicas": self.job.replicas,
            "batch": self.job.batch.model_dump(mode="json", by_alias=True),
            "policy": self.job.policy,
            "offload_ratio": self.offload_ratio,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "budget_bytes": self.job.memory_budget_bytes,
        }


def in_words(job: Job) -> str:
    """`t4 c1 p8 d8, 2 layers per chunk, SP, micro-batch 2, full`: sizes are tensor, context, pipeline and data parallel."""
    parallel = job.parallel
    sizes = f"t{parallel.tensor} c{parallel.context} p{parallel.pipeline} d{job.replicas}"
    chunks = f"{parallel.layers_per_chunk} layers per chunk" if parallel.layers_per_chunk else ""
    slices = "SP" if parallel.sequence_parallel else ""
    experts = f"e{parallel.expert}" if job.model.experts is not None else ""
    parts = (f"{sizes} {experts}".strip(), chunks, slices, f"micro-batch {job.batch.micro}", job.policy)
    return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Excess:
    """Bytes over a limit: of a stage on its device, or of a node's offloaded tensors on its host."""

    job: Job
    stage: int
    memory: StageMemory
    """Memory of the stage; of a plan's with as much offloaded as possible."""
    usage: float
    limit: float
    host: bool = False

    @property
    def bytes(self) -> float:
        return self.usage - self.limit

    @property
    def largest_part(self) -> str:
        kinds = self.memory.kinds
        name = max(kinds, key=lambda kind: kinds[kind])
        return f"{name} {format_bytes(kinds[name])}"


def fit(job: Job) -> StageMemory | Excess:
    """Return the memory of the fullest stage under a policy of stock's, for a plan that of full recomputation; or its excess."""
    budget = job.memory_budget_bytes
    stages = memory_of_stages(job.model_copy(update={"policy": "full"}) if job.policy == "planned" else job)
    stage = max(range(len(stages)), key=lambda number: stages[number].total)
    if job.cluster.node is not None and (left := least_left_bytes(job)) < 0:
        limit = job.cluster.node.host_memory_gib * GIB
        return Excess(job, stage, stages[stage], limit - left, limit, host=True)
    return stages[stage] if stages[stage].total <= budget else Excess(job, stage, stages[stage], stages[stage].total, budget)
