"""The launch as it is written, priced: what everything else on the screen is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lynx.advise.rows import Row, as_stock
from megatron_lynx.config.job import Job
from megatron_lynx.cost.update import update_s
from megatron_lynx.launch_arguments import Reading
from megatron_lynx.launch_arguments.today import cannot_train
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.stock.price import exchanges_hidden, priced
from megatron_lynx.stock.setting import NONE, StockSetting
from megatron_lynx.units import format_seconds


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
    """A step, if exchanges that run beside computing are hidden whole; `row` has them as if nothing hid them."""
    unknown: str = ""
    written: bool = True
    """Whether there is a launch; a job has none, and is held against stock without recomputation."""

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
        return Launch("stock none", (), _row(job, costs, NONE, "stock none"), written=False)
    today = reading.today
    unknown = _unknown(job, reading)
    if unknown:
        return Launch(today.name, today.flags, None, unknown=unknown)
    row = _row(job, costs, today.setting, today.name)
    best = _row(job, exchanges_hidden(costs), today.setting, "").step_s if today.overlaps_exchanges else None
    return Launch(today.name, today.flags, row, best)


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


def _row(job: Job, costs: Profile, setting: StockSetting, what: str) -> Row:
    own = as_stock(job)
    price = priced(own, costs, setting)
    return Row(what, price.step_s + update_s(own, costs), price.most_bytes)
