"""Where no plan fits the budget: what would make one fit, nearest first.

[1] activations on the host          [2] a part of the optimizer on the host, with what its update then takes
[3] another layout of as many GPUs   [4] more GPUs, in the same layout: twice, four, eight times as many
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import OnHost
from megatron_lynx.planner.decision import plannable
from megatron_lynx.planner.nearest import Changes, fewest_changes, with_changes
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile

TIMES_AS_MANY = (2, 4, 8)

QUARTERS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the optimizer that are tried."""

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
    """The least quarter of the optimizer's state with which a plan fits when that is on the host. Megatron steps a part of the
    parameters there only with a precision-aware optimizer, which has to be distributed."""
    if job.optimizer.offload != 0:
        return None
    aware: Changes = () if job.optimizer.precision_aware else (("optimizer.precision_aware", True),)
    for share in QUARTERS:
        asked = with_changes(job, [*aware, ("optimizer.offload", share)])
        if asked is not None and plannable(asked, costs):
            flags = "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction"
            adam = None if costs.host_time is None else costs.host_time.adam
            on_host = OnHost.of(asked, adam, priced=adam is not None)
            assert on_host is not None, "a share of the optimizer is there"
            return f"{on_host.in_words}: {flags} {share:g}"
    return None


def _more_gpus(job: Job) -> Iterator[str]:
    for times in TIMES_AS_MANY:
        more = with_changes(job, [("gpus", times * job.gpus)])
        if more is not None and plannable(more, analytic_profile(more)):
            yield f"more GPUs in this layout: {more.gpus} in place of {job.gpus}, with the same batch"
            return
