"""The launch as it is written, priced: what everything else on the screen is held against. Also one that no plan goes with, if
what it does today can be priced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.combined import MEASURED, UNDISTURBED, Beside
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch_arguments import Reading, job_of, read_launch
from megatron_lynx.launch_arguments.today import Today, cannot_train
from megatron_lynx.planner import Decision
from megatron_lynx.planner.figures import figures_of
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.stock.price import priced
from megatron_lynx.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Launch:
    """What a launch, or a job without one, takes today.

    `setting`: in words. `flags`: those that the launch under a plan is printed without. `row`: None where nobody can say;
    `unknown` then says why.
    """

    setting: str
    flags: tuple[str, ...]
    row: Row | None
    at_best_s: float | None = None
    """A step at best, where it is a range (`range_why`), as plans are priced; `row` has it at worst."""
    range_why: str = ""
    unknown: str = ""
    graphs: bool = False
    """Whether anything is captured: then the host's time is not counted."""
    graph_bytes: int = 0
    """What the graphs hold besides, in `row`: of those that a plan may be beside. Of others it is not counted."""
    written: bool = True
    """Whether there is a launch; a job has none, and is held against stock without recomputation."""

    alone: str = ""
    """Why no plan is beside its graphs; empty where one may be."""
    keeps_graphs: bool = False
    """Whether the plan is beside its graphs."""

    def kept_beside(self, today: Today) -> Launch:
        """The same with what the plan leaves out of it."""
        return replace(self, flags=today.flags, keeps_graphs=today.keeps_graphs)

    @property
    def graphs_in_words(self) -> str:
        """What becomes of its graphs under a plan; empty where it has none."""
        if not self.graphs:
            return ""
        if self.keeps_graphs:
            return "graphs: the plan is beside them: what they capture is kept whole"
        if self.alone:
            return f"graphs: no plan is beside them: {self.alone}"
        return "graphs: the plan is faster, or fits, without them"

    @property
    def graphs_priced_in_words(self) -> str:
        """What is counted of them."""
        held = "what they hold in memory themselves is not counted"
        if self.graph_bytes:
            held = f"they hold {format_bytes(self.graph_bytes)} besides"
        return f"today's graphs: as if the host took no time for anything; {held}"

    @property
    def least_s(self) -> float:
        """What a plan has to beat."""
        assert self.row is not None, "it is priced"
        return self.row.step_s if self.at_best_s is None else self.at_best_s

    @property
    def seconds(self) -> str:
        """A step, or its range."""
        if self.row is None:
            return "-"
        worst = format_seconds(self.row.step_s)
        return worst if self.at_best_s is None else f"{format_seconds(self.at_best_s)} to {worst}"

    @property
    def as_json(self) -> dict[str, Any]:
        figures = {"step_s": None, "memory_bytes": None} if self.row is None else self.row.as_json
        best = {} if self.at_best_s is None else {"step_at_best_s": self.at_best_s}
        why = {"not_priced": self.unknown} if self.unknown else {}
        return {**figures, **best, "setting": self.setting, "flags": list(self.flags), **why}


def launch_today(job: Job, costs: Profile, reading: Reading | None) -> Launch:
    """What the launch takes. `reading`: None for a job without a launch."""
    if reading is None:
        return Launch("stock none", (), _row(job, costs, Today()), written=False)
    today = reading.today
    unknown = _unknown(job, reading)
    if unknown:
        return Launch(today.name, today.flags, None, unknown=unknown)
    more = graph_bytes(job) if today.graphs else 0
    row = _row(job, costs, today, MEASURED, more)
    why = today.setting.range_in_words
    best = _row(job, costs, today).step_s if why else None
    return Launch(today.name, today.flags, row, best, why, graphs=today.graphs, graph_bytes=more, alone=today.alone)


def _unknown(job: Job, reading: Reading) -> str:
    """Why nobody can say what the launch takes; empty where it is priced."""
    if reading.today.not_priced:
        return "; ".join(reading.today.not_priced)
    if (why := cannot_train(reading.given, reading.today, job)) is not None:
        return why
    stages = job.parallel.pipeline
    if job.parallel.partition == "auto" and job.model.layers % stages:
        return f"{job.model.layers} layers do not divide among {stages} stages: Megatron stops, a plan may place them"
    return ""


def graph_bytes(job: Job) -> int:
    """By how much captured graphs raise the fullest stage of stock without recomputation (`cost.graphs`)."""
    plain = as_stock(job)
    beside = plain.model_copy(update={"model": job.model})
    return _fullest(beside) - _fullest(plain) if job.model.captured else 0


def _fullest(job: Job) -> int:
    return max(memory.total for memory in memory_of_stages(job))


def _row(job: Job, costs: Profile, today: Today, beside: Beside = UNDISTURBED, more_bytes: int = 0) -> Row:
    own = as_stock(job)
    issued = costs.model_copy(update={"host_time": None}) if today.graphs else costs
    price = priced(own, issued, today.setting, beside)
    return Row(today.name, price.step_s + update_s(own, costs), price.most_bytes + more_bytes)


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
    figures = figures_of(decision.job, costs, decision.simulation)
    return Row(what, figures.step_s, figures.memory_bytes)


def gain(row: Row, before_s: float) -> float:
    """The part of a step that a row saves."""
    return 1 - row.step_s / before_s


STOCK = {"policy": "none", "schedule": "flush", "defer_updates": True}


def as_stock(job: Job) -> Job:
    """The job as stock Megatron runs it: where its launch leaves the layers' places open, stages are alike."""
    parallel = job.parallel
    if parallel.partition == "auto":
        parallel = parallel.model_copy(update={"partition": None})
    model = job.model.model_copy(update={"captured": ()})  # priced by `today`
    return job.model_copy(update={**STOCK, "parallel": parallel, "model": model})


@dataclass(frozen=True)
class Asked:
    """A launch, and its job. `refused`: what no plan goes with; the job is then that of an estimate."""

    job: Job
    reading: Reading
    refused: tuple[Problem, ...] = ()


def asked_launch(
    words: Sequence[str],
    cluster: str,
    gpus: int | None = None,
    changes: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
) -> Asked:
    """Raises `ConfigError` with all problems where the launch cannot even be priced."""
    reading = read_launch(words, gpus=gpus, strict=strict)
    if not reading.problems:
        return Asked(job_of(reading, cluster, changes), reading)
    as_it_is = read_launch(words, gpus=gpus, planning=False, strict=strict)
    try:
        return Asked(job_of(as_it_is, cluster, changes), as_it_is, reading.problems)
    except ConfigError:
        job_of(reading, cluster, changes)
        raise
