"""Where no plan fits the budget: what would make one fit, nearest first.

[1] activations on the host          [2] the optimizer on the host        bytes alone: the update's seconds are not priced
[3] another layout of as many GPUs   [4] more GPUs, in the same layout: twice, four, eight times as many
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.config.job import Job
from megatron_lynx.planner import least_memory
from megatron_lynx.planner.decision import plannable
from megatron_lynx.planner.nearest import fewest_changes, with_changes
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.units import format_bytes

TIMES_AS_MANY = (2, 4, 8)

OF_THE_HOST = ("offload_ratio",)


def would_fit(job: Job, costs: Profile) -> Iterator[str]:
    """A sentence for each."""
    if job.offload_ratio != "auto" and plannable(job.model_copy(update={"offload_ratio": "auto"}), costs):
        yield "activations on the host: offload_ratio: auto in a job file (no flag of a launch says it)"
    if (freed := _optimizer(job, costs)) is not None:
        yield freed
    if job.cluster.matmul is None:
        return
    if (changes := fewest_changes(job, costs, plannable, OF_THE_HOST)) is not None:
        yield f"another layout: {', '.join(f'{key}: {str(value).lower()}' for key, value in changes)}"
    yield from _more_gpus(job)


def _optimizer(job: Job, costs: Profile) -> str | None:
    """Whether a plan would fit if its fullest stages held no state of the optimizer."""
    stages, budget = least_memory(job, costs), job.memory_budget_bytes
    over = [memory for memory in stages if memory.total > budget]
    if not over or any(memory.total - memory.optimizer > budget for memory in over):
        return None
    missing, freed = max(memory.total - budget for memory in over), min(memory.optimizer for memory in over)
    sizes = f"it holds {format_bytes(freed)}, {format_bytes(missing)} are missing"
    return f"the optimizer on the host (--optimizer-cpu-offload): {sizes}; its seconds are not priced here"


def _more_gpus(job: Job) -> Iterator[str]:
    for times in TIMES_AS_MANY:
        more = with_changes(job, [("gpus", times * job.gpus)])
        if more is not None and plannable(more, analytic_profile(more)):
            yield f"more GPUs in this layout: {more.gpus} in place of {job.gpus}, with the same batch"
            return
