"""A way to run a job that fits: its layout and policy, and the parts of its step.

Decides whether a job fits its devices, and the share of its activations in host memory.

parameters, gradients, optimizer and the rest     too much: no policy and no micro-batch size of this layout fits
+ activations, nothing offloaded                  fits: nothing is offloaded
+ activations, everything offloaded               too much: does not fit
otherwise                                         the smallest share that fits, if the host has memory for it
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import least_left_bytes
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.parameters import mfu
from megatron_lynx.cost.stage_memory import OffloadingStages, host_bytes
from megatron_lynx.errors import Infeasible
from megatron_lynx.solver.offload import smallest_ratio
from megatron_lynx.units import GIB, format_bytes


@dataclass(frozen=True)
class Spent:
    """Parts of a step's seconds."""

    compute_s: float
    """Forwards and backwards of the slowest stage."""
    recompute_s: float
    """Recomputation on demand there, with its collectives."""
    communication_s: float
    """Exposed collectives of the slowest stage, messages between stages, gradients and parameters, the optimizer."""
    bubble_s: float
    copies_s: float = 0.0
    """Exposed copies to and from the host."""

    @property
    def total_s(self) -> float:
        return self.compute_s + self.recompute_s + self.communication_s + self.bubble_s + self.copies_s

    def with_update(self, update_s: float) -> Spent:
        return replace(self, communication_s=self.communication_s + update_s)


@dataclass(frozen=True)
class Candidate:
    """`job` has its layout, micro-batch size and policy, and its offload ratio unless a plan decides that."""

    job: Job
    step_s: float
    """As simulated, with gradients and optimizer."""
    spent: Spent
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
    def bubble_share(self) -> float:
        """Share of the closed form's step in which stages are idle."""
        return self.spent.bubble_s / self.spent.total_s

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "parallel": self.job.parallel.model_dump(mode="json", exclude_none=True),
            "replicas": self.job.replicas,
            "batch": self.job.batch.model_dump(mode="json", by_alias=True),
            "schedule": self.job.schedule,
            "gradient_age_updates": int(self.job.schedule != "flush"),
            "policy": self.job.policy,
            "offload_ratio": self.offload_ratio,
            "step_s": self.step_s,
            "closed_form_s": self.spent.total_s,
            "spent_s": {name.removesuffix("_s"): value for name, value in asdict(self.spent).items()},
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "bubble_share": self.bubble_share,
            "memory_bytes": self.memory_bytes,
            "budget_bytes": self.job.memory_budget_bytes,
        }


def in_words(job: Job) -> str:
    """`t4 c1 p8 d8, 2 layers per chunk, SP, micro-batch 2, balanced`."""
    parallel = job.parallel
    chunks = f"{parallel.layers_per_chunk} layers per chunk" if parallel.layers_per_chunk else ""
    slices = "SP" if parallel.sequence_parallel else ""
    experts = f"e{parallel.expert}" if job.model.experts is not None else ""
    parts = (f"{sizes(job)} {experts}".strip(), chunks, slices, f"micro-batch {job.batch.micro}", job.policy)
    return ", ".join(part for part in parts if part)


def sizes(job: Job) -> str:
    """Tensor, context, pipeline and data parallel sizes: `t4 c1 p8 d8`."""
    parallel = job.parallel
    return f"t{parallel.tensor} c{parallel.context} p{parallel.pipeline} d{job.replicas}"


@dataclass(frozen=True)
class Excess:
    """Bytes over a limit: of a stage on its device, or of a node's offloaded tensors on its host."""

    job: Job
    stage: int
    memory: StageMemory
    """Memory of the stage with as much offloaded as possible."""
    usage: float
    limit: float
    host: bool = False

    @property
    def bytes(self) -> float:
        return self.usage - self.limit

    @property
    def largest_part(self) -> str:
        """The largest part of the stage's memory."""
        kinds = self.memory.kinds
        name = max(kinds, key=lambda kind: kinds[kind])
        return f"{name} {format_bytes(kinds[name])}"


@dataclass(frozen=True)
class Fits:
    offload_ratio: float
    memory: StageMemory


def fit(job: Job, offload: bool) -> Fits | Excess:
    """Fit a job whose policy is not `planned`. `offload`: whether activations may go to the host."""
    budget, stages = job.memory_budget_bytes, OffloadingStages.of(job)
    stage, kept = fullest(stages, 0.0)
    if job.cluster.node is not None and (left := least_left_bytes(job)) < 0:
        limit = job.cluster.node.host_memory_gib * GIB
        return Excess(job, stage, kept, limit - left, limit, host=True)
    if kept.total <= budget:
        return Fits(0.0, kept)
    if not offload or job.model.experts is not None:  # activations of experts stay, so no single share applies
        return Excess(job, stage, kept, kept.total, budget)
    stage, least = fullest(stages, 1.0)
    if least.total > budget:
        return Excess(job, stage, least, least.total, budget)
    try:
        ratio = smallest_ratio(job)
    except Infeasible:
        return _host_excess(job, stage, least)
    return Fits(ratio, fullest(stages, ratio)[1])


def fullest(stages: OffloadingStages, ratio: float) -> tuple[int, StageMemory]:
    """The fullest stage and its memory; of equals the first."""
    parts = stages.parts(ratio)
    peaks = [part.peak_bytes for part in parts]
    stage = max(range(len(peaks)), key=lambda number: peaks[number])
    return stage, parts[stage].fullest


def _host_excess(job: Job, stage: int, least: StageMemory) -> Excess:
    """The excess of a job that would fit with more host memory."""
    node = job.cluster.node
    assert node is not None, "who offloads says where to"
    roomy = job.cluster.model_copy(update={"node": node.model_copy(update={"host_memory_gib": float("inf")})})
    ratio = smallest_ratio(job.model_copy(update={"cluster": roomy}))
    needed = job.host_sharers * max(host_bytes(job, number, ratio) for number in range(job.parallel.pipeline))
    return Excess(job, stage, least, needed, least_left_bytes(job), host=True)
