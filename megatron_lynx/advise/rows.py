"""One way to run a job, in seconds and bytes: a row of the screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.update import update_s
from megatron_lynx.planner import Decision
from megatron_lynx.profiler.profile import Profile


@dataclass(frozen=True)
class Row:
    """`step_s`: a whole step, the optimizer's update included. `memory_bytes`: what the fullest device holds."""

    what: str
    step_s: float
    memory_bytes: int

    @property
    def as_json(self) -> dict[str, Any]:
        return {"step_s": self.step_s, "memory_bytes": self.memory_bytes}


def row_of(decision: Decision, costs: Profile, what: str) -> Row:
    """A plan's."""
    step_s = decision.simulation.step_s + update_s(decision.job, costs)
    return Row(what, step_s, max(memory.total for memory in decision.memory))


def gain(row: Row, before_s: float) -> float:
    """The part of a step that a row saves."""
    return 1 - row.step_s / before_s


def as_stock(job: Job) -> Job:
    """The job as stock Megatron runs it: where its launch leaves the layers' places open, stages are alike."""
    parallel = job.parallel
    if parallel.partition == "auto":
        parallel = parallel.model_copy(update={"partition": None})
    return job.model_copy(update={"policy": "none", "parallel": parallel, "schedule": "flush", "defer_updates": True})
