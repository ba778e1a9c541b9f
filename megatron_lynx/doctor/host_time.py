"""Whether Python stays ahead of the GPUs: this machine's host time, and what of a launch and of its plan waits for it.

host time of this machine ──┐
launch, --cluster ──job──> device seconds of every pass ──> "host-bound", or not, as the launch stands
plan ─────────────────────> rehearsed ────────────────────> the same under the plan
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lynx.config.host_time import HostTime, Setting
from megatron_lynx.config.job import Job
from megatron_lynx.cost.host import HostReport
from megatron_lynx.doctor.finding import Finding
from megatron_lynx.errors import LynxError
from megatron_lynx.estimate import host_report
from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.plan import load_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.units import format_seconds

TOPIC = "host time"


@dataclass(frozen=True)
class Unmeasured:
    """Why this machine's host time is not known."""

    reason: str


@dataclass(frozen=True)
class Asked:
    """What is to be judged by host time: a launch on a cluster, and a plan."""

    words: Sequence[str] = ()
    cluster: str | None = None
    plan_file: str | os.PathLike[str] | None = None


def host_time(measured: HostTime | Unmeasured, asked: Asked) -> Iterator[Finding]:
    """What this machine's host takes for a layer, and whether the launch and the plan wait for it."""
    if isinstance(measured, Unmeasured):
        costs = "whether a launch waits for Python is not known"
        yield Finding(TOPIC, "note", f"not measured: {measured.reason}", costs, "install what is missing, and ask again")
        return
    for implementation in measured.measured:
        layer = measured.of(implementation)
        figures = ", ".join(f"{words} {format_seconds(layer.layer_s(setting))}" for setting, words in SHOWN.items())
        whose = measured.words_for(implementation)
        yield Finding(TOPIC, "good", f"a layer and micro-batch, forward and backward: {figures} ({whose})")
    if not asked.words or asked.cluster is None:
        costs = "passes that are shorter on the GPU wait for Python"
        yield Finding("host-bound", "note", "not judged", costs, "name the GPUs of a launch: --cluster C -- LAUNCH")
        return
    try:
        yield from _judged(measured, asked, asked.cluster)
    except LynxError as error:
        problems = "; ".join(map(str, error.problems)) or str(error)
        yield Finding("host-bound", "note", f"not judged: {problems}", "whether the launch waits for Python is not known")


SHOWN: dict[Setting, str] = {
    "none": "stock none",
    "full": "stock full",
    "kept": "a plan that keeps all",
    "replayed": "one that replays all",
}


def _judged(measured: HostTime, asked: Asked, cluster: str) -> Iterator[Finding]:
    """The launch under stock's own recomputation, then the plan. Raises `LynxError` where they cannot be priced."""
    job = job_of(read_launch(asked.words, planning=False), cluster)
    costs = analytic_profile(job).model_copy(update={"host_time": measured})
    yield _finding("host-bound launch", HostReport.of(costs, host_report(_as_stock(job), costs).bound))
    if asked.plan_file is not None:
        bound = rehearse(load_plan(asked.plan_file), costs).host_bound
        yield _finding("host-bound plan", HostReport.of(costs, bound))


def _as_stock(job: Job) -> Job:
    """The job without a plan. A launch that leaves the policy open recomputes nothing."""
    return job.model_copy(update={"policy": "none"}) if job.policy == "planned" else job


def _finding(topic: str, report: HostReport) -> Finding:
    if not report.bound:
        return Finding(topic, "good", f"no: Python stays ahead of the GPU in every pass (host time of {report.words})")
    worst = max(report.bound, key=lambda load: load.host_s / load.device_s)
    stages = ", ".join(str(load.stage) for load in report.bound)
    seconds = f"{format_seconds(worst.host_s)} of a step on the host, {format_seconds(worst.device_s)} on the GPU"
    whose = f"(host time of {report.words})"
    costs = "the GPU waits for Python: hiding replays gains nothing there"
    todo = "a larger micro-batch, a smaller tensor-parallel size, or a plan made with --profile, which then touches fewer halves"
    return Finding(topic, "slows", f"stages {stages}; stage {worst.stage}: {seconds} {whose}", costs, todo)
