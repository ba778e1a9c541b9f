"""The launch as written, priced: the baseline of the screen. Includes launches that no plan goes with, if they can be priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host_optimizer import host_shortage
from megatron_lynx.cost.step import StepRange
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch_arguments import Reading, job_of, read_launch
from megatron_lynx.launch_arguments.today import Today, cannot_train
from megatron_lynx.planner import Decision
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.stock.legality import NEWEST
from megatron_lynx.stock.price import Priced, least_bytes, priced
from megatron_lynx.stock.rival import fastest, rivals
from megatron_lynx.stock.setting import NONE, StockSetting
from megatron_lynx.units import format_bytes


@dataclass(frozen=True)
class Launch:
    """`flags`: those left out of the launch under a plan. `row`: None if it cannot be priced; `unknown` then has the reason."""

    setting: str
    flags: tuple[str, ...]
    row: Row | None
    unknown: str = ""
    graphs: bool = False
    """Whether it captures graphs; host time is then not counted."""
    graph_bytes: int = 0
    """Bytes of graphs that a plan may keep, counted in `row`. Those of other graphs are not counted."""
    written: bool = True
    """Whether there is a launch; a job without one is compared with stock without recomputation."""
    alone: str = ""
    keeps_graphs: bool = False

    @property
    def graphs_in_words(self) -> str:
        if self.keeps_graphs:
            return "graphs: the plan is beside them: what they capture is kept whole"
        if self.alone:
            return f"graphs: no plan is beside them: {self.alone}"
        return "graphs: the plan is faster, or fits, without them"

    @property
    def graphs_priced_in_words(self) -> str:
        held = "what they hold in memory themselves is not counted"
        if self.graph_bytes:
            held = f"they hold {format_bytes(self.graph_bytes)} besides"
        return f"today's graphs: as if the host took no time for anything; {held}"

    @property
    def as_json(self) -> dict[str, Any]:
        figures = {"step_s": None, "memory_bytes": None} if self.row is None else self.row.as_json
        why = {"not_priced": self.unknown} if self.unknown else {}
        return {**figures, "setting": self.setting, "flags": list(self.flags), **why}


def launch_today(job: Job, costs: Profile, reading: Reading | None) -> Launch:
    if reading is None:
        return Launch("stock none", (), _row(job, costs, Today()), written=False)
    today = reading.today
    unknown = _unknown(job, reading)
    if unknown:
        return Launch(today.name, today.flags, None, unknown=unknown)
    row, more = _row(job, costs, today), graph_bytes(job, today.setting)
    return Launch(today.name, today.flags, row, graphs=today.graphs, graph_bytes=more, alone=today.alone)


def _unknown(job: Job, reading: Reading) -> str:
    if reading.today.not_priced:
        return "; ".join(reading.today.not_priced)
    if (why := cannot_train(reading.given, reading.today, job)) is not None:
        return why
    return _undivided(job)


def _undivided(job: Job) -> str:
    """Why stock Megatron cannot place the layers; empty if it can."""
    stages = job.parallel.pipeline
    if job.parallel.partition == "auto" and job.model.layers % stages:
        return f"{job.model.layers} layers do not divide among {stages} stages: Megatron stops, a plan may place them"
    return ""


def graph_bytes(job: Job, setting: StockSetting = NONE) -> int:
    """Bytes that captured graphs add to the fullest stage under a stock setting (`cost.stage_memory`)."""
    if not job.model.captured:
        return 0
    return least_bytes(as_stock(job, graphs=True), setting) - least_bytes(as_stock(job), setting)


def _row(job: Job, costs: Profile, today: Today) -> Row:
    stock_job = as_stock(job, graphs=True)
    return stock_row(stock_job, costs, priced(stock_job, costs.issued(graphs=today.graphs), today.setting))


@dataclass(frozen=True)
class Row:
    """`step`: a whole step, including the optimizer's update. `memory_bytes`: of the fullest device."""

    step: StepRange
    memory_bytes: int
    range_why: str = ""

    @property
    def expected_s(self) -> float:
        return self.step.expected_s

    @property
    def as_json(self) -> dict[str, Any]:
        return {**self.step.as_json, "memory_bytes": self.memory_bytes}


def fits(row: Row, job: Job) -> bool:
    return row.memory_bytes <= job.memory_budget_bytes and host_shortage(job, 0.0) is None


BY_USERBUFFERS = "range: userbuffers hide all that their GEMMs can, to no more than without"
BY_DEFERRED_HEAD = "range: the step's end hides the head's deferred weight gradients, or not"


def stock_row(job: Job, costs: Profile, price: Priced) -> Row:
    with_userbuffers = job.userbuffers or price.setting.userbuffers
    why = "" if price.step.is_known else BY_USERBUFFERS if with_userbuffers else BY_DEFERRED_HEAD
    return Row(price.step.plus(update_s(job, costs)), price.most_bytes, why)


@dataclass(frozen=True)
class Stock:
    setting: StockSetting
    row: Row
    launch: bool = False
    rivals: tuple[Priced, ...] = field(default=(), repr=False)


def stocks_best(job: Job, costs: Profile, release: str | None) -> Stock | None:
    """The one with fewer bytes among equals; None if none fits, or stock cannot place the layers. `release`: None: the newest."""
    stock_job = as_stock(job)
    prices = [] if _undivided(job) else rivals(stock_job, costs, job.memory_budget_bytes, release or NEWEST)
    best = fastest(prices)
    return None if best is None else Stock(best.setting, stock_row(stock_job, costs, best), rivals=tuple(prices))


def or_launch(best: Stock | None, launch: Launch, reading: Reading | None, job: Job) -> Stock | None:
    if launch.row is None or reading is None or not fits(launch.row, job):
        return best
    if best is not None and best.row.expected_s < launch.row.expected_s * (1 - ROUNDING):
        return best
    return Stock(reading.today.setting, launch.row, launch=True, rivals=() if best is None else best.rivals)


ROUNDING = 1e-6


def row_of(planned: Decision) -> Row:
    return Row(planned.step, planned.memory_bytes, "" if planned.step.is_known else BY_USERBUFFERS)


def gain(row: Row, before: Row) -> float:
    return 1 - row.expected_s / before.expected_s


def gains(row: Row, before: Row) -> tuple[float, float]:
    """Least and largest relative saving over another step: both ends of two ranges are compared."""
    savings = (1 - row.step.most_s / before.step.most_s, 1 - row.step.least_s / before.step.least_s)
    return min(savings), max(savings)


STOCK = {"policy": "none", "schedule": "flush", "defer_updates": True}


def as_stock(job: Job, *, graphs: bool = False) -> Job:
    parallel = job.parallel
    if parallel.partition == "auto":
        parallel = parallel.model_copy(update={"partition": None})
    stock_job = job.model_copy(update={**STOCK, "parallel": parallel})
    return stock_job if graphs else stock_job.with_captured(())


@dataclass(frozen=True)
class Asked:
    """A launch and its job. `refused`: problems that exclude any plan; the job is then for an estimate."""

    job: Job
    reading: Reading
    refused: tuple[Problem, ...] = ()


def asked_launch(
    words: Sequence[str], cluster: str, gpus: int | None = None, changes: Mapping[str, Any] | None = None, *, strict: bool = False
) -> Asked:
    """Read a launch. Raises `ConfigError` with all problems if it cannot even be priced."""
    reading = read_launch(words, gpus=gpus, strict=strict)
    if not reading.problems:
        return Asked(job_of(reading, cluster, changes), reading)
    as_it_is = read_launch(words, gpus=gpus, planning=False, strict=strict)
    try:
        return Asked(job_of(as_it_is, cluster, changes), as_it_is, reading.problems)
    except ConfigError:
        job_of(reading, cluster, changes)
        raise
