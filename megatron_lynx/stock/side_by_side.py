"""A plan compared with stock Megatron's strongest settings, simulated: one row each.

Rows: none and full, the fastest few that fit, ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.step import StepRange
from megatron_lynx.cost.update import update_s
from megatron_lynx.prediction import within_error
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.stock.price import Priced, priced
from megatron_lynx.stock.rival import by_speed
from megatron_lynx.stock.setting import FULL, NONE
from megatron_lynx.units import format_bytes, speed_in_words

STRONGEST = 5


@dataclass(frozen=True)
class SimulatedRow:
    """One setting: seconds of a step, including the optimizer's update."""

    setting: str
    step: StepRange
    device_bytes: int
    """Bytes on the fullest device."""
    host_bytes: int = 0
    """Page-locked memory of the rank with the most."""
    flags: tuple[str, ...] = ()
    ours: bool = False
    ratio_to_none: float = 1.0

    @property
    def as_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "step"}
        return {**fields, **self.step.as_json, "flags": list(self.flags)}


def allowed_bytes(job: Job, ours_bytes: int) -> int:
    """Device bytes that stock may use: our budget, even if ours needs less; on the testbed, ours."""
    return job.memory_budget_bytes if job.cluster.device == "cuda" else ours_bytes


def side_by_side(
    job: Job, profile: Profile, ours: SimulatedRow, rivals: Iterable[Priced], today: SimulatedRow | None = None
) -> list[SimulatedRow]:
    """Return the rows. `job`: as stock runs it. `ours`: the plan's row. `rivals`: settings that fit. `today`: the launch's row,
    which is the first whatever its bytes."""
    none, full = priced(job, profile, NONE), priced(job, profile, FULL)
    contenders = [price for price in sorted(rivals, key=by_speed) if price.setting not in (NONE, FULL)]
    added_s = update_s(job, profile)
    rows = [_row(price, added_s) for price in (none, full, *contenders[:STRONGEST])]
    if today is not None:
        rows = [today, *(row for row in rows if f"today: {row.setting}" != today.setting)]
    none_s = none.step_s + added_s
    return [replace(row, ratio_to_none=row.step.expected_s / none_s) for row in (*rows, ours)]


def _row(price: Priced, added_s: float) -> SimulatedRow:
    """`added_s`: seconds of the update, the same for all settings."""
    setting, step = price.setting, price.step.plus(added_s)
    return SimulatedRow(f"stock {setting.name}", step, price.most_bytes, price.host_bytes, setting.flags)


def verdict(rows: list[SimulatedRow], budget_bytes: int, *, experts: bool) -> str:
    """Return sentences that compare ours with the fastest stock setting that fits. `experts`: whether the model has them."""
    ours = next(row for row in rows if row.ours)
    small = [row for row in rows if not row.ours and row.device_bytes <= budget_bytes]
    best = min(small, key=lambda row: row.step.expected_s, default=None)
    if best is None:
        return f"No stock setting fits into {format_bytes(budget_bytes)}."
    how = speed_in_words(ours.step.expected_s, best.step.expected_s)
    flags = " ".join(best.flags) or "no flags"
    unsure = within_error(ours.step.expected_s, best.step.expected_s, experts=experts)
    fastest = f"the fastest stock setting that fits into {format_bytes(budget_bytes)} ({flags})"
    return f"ours is {how} {best.setting}, {fastest}. {unsure}".rstrip()
