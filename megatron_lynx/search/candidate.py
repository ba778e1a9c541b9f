"""One way to run a job that fits: its layout, its policy, what it takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.flops import mfu
from megatron_lynx.search.schedules import GRADIENT_AGE_UPDATES, schedule_of
from megatron_lynx.search.spent import Spent


@dataclass(frozen=True)
class Candidate:
    """`job` states it whole: its layout, micro-batch size and policy; its offload ratio, but where a plan is to say it."""

    job: Job
    step_s: float
    """As simulated, with gradients and optimizer."""
    spent: Spent
    """The closed form's account of a step."""
    offload_ratio: float
    """The largest of all stages: plans have one for each."""
    memory_bytes: int
    """Of the fullest stage, everything counted."""

    @property
    def tokens_per_s(self) -> float:
        """Of all devices together."""
        return self.job.batch.global_ * self.job.model.seq / self.step_s

    @property
    def mfu(self) -> float:
        """In [0, 1], causal attention counted half."""
        matmul = self.job.cluster.matmul
        assert matmul is not None, "an analytic profile was made of it"
        return mfu(self.job.model, self.tokens_per_s, self.job.gpus * matmul.peak_flop_per_s(self.job.model.dtype))

    @property
    def bubble_share(self) -> float:
        """Of the closed form's step."""
        return self.spent.bubble_s / self.spent.total_s

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "parallel": self.job.parallel.model_dump(mode="json", exclude_none=True),
            "replicas": self.job.replicas,
            "batch": self.job.batch.model_dump(mode="json", by_alias=True),
            "schedule": self.job.schedule,
            "gradient_age_updates": GRADIENT_AGE_UPDATES[schedule_of(self.job)],
            "policy": self.job.policy,
            "offload_ratio": self.offload_ratio,
            "step_s": self.step_s,
            "closed_form_s": self.spent.total_s,
            "spent_s": {name.removesuffix("_s"): value for name, value in asdict(self.spent).items()},
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "bubble_share": self.bubble_share,
            "memory_bytes": self.memory_bytes,
        }


def in_words(job: Job) -> str:
    """`t4 c1 p8 d8, 2 layers per chunk, SP, micro-batch 2, balanced`."""
    parallel = job.parallel
    chunks = f"{parallel.layers_per_chunk} layers per chunk" if parallel.layers_per_chunk else ""
    slices = "SP" if parallel.sequence_parallel else ""
    schedule = "without flushes" if job.schedule == "double_buffered" else ""
    experts = f"e{parallel.expert}" if job.model.experts is not None else ""
    parts = (f"{sizes(job)} {experts}".strip(), chunks, schedule, slices, f"micro-batch {job.batch.micro}", job.policy)
    return ", ".join(part for part in parts if part)


def sizes(job: Job) -> str:
    """Tensor, context, pipeline and data parallel: `t4 c1 p8 d8`."""
    parallel = job.parallel
    return f"t{parallel.tensor} c{parallel.context} p{parallel.pipeline} d{job.replicas}"
