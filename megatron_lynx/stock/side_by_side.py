"""A plan beside stock Megatron's strongest settings, simulated: a row for each.

none, full                what everybody knows
the fastest few that fit: what to beat
ours
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.update import update_s
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.stock.legality import NEWEST
from megatron_lynx.stock.price import Priced, priced
from megatron_lynx.stock.rival import rivals
from megatron_lynx.stock.setting import FULL, NONE, StockSetting
from megatron_lynx.units import format_bytes

STRONGEST = 5
"""Rivals that get a row."""


@dataclass(frozen=True)
class SimulatedRow:
    """One setting: seconds of a step, the optimizer's update included."""

    setting: str
    ours: bool
    step_s: float
    ratio_to_none: float
    device_bytes: int
    """What the fullest device holds."""
    host_bytes: int
    """Page-locked memory of the rank that needs most."""
    flags: tuple[str, ...]
    """What stock's launch says for it."""

    @property
    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "flags": list(self.flags)}


def allowed_bytes(job: Job, ours_bytes: int) -> int:
    """What stock may use of a device: what ours may, even where ours needs less. On the testbed, whose memory says nothing, what
    ours holds."""
    return job.memory_budget_bytes if job.cluster.device == "cuda" else ours_bytes


def side_by_side(
    job: Job,
    profile: Profile,
    ours_s: float,
    ours_bytes: int,
    budget_bytes: int,
    release: str = NEWEST,
    today: StockSetting | None = None,
) -> list[SimulatedRow]:
    """`ours_s`, `ours_bytes`: a step under the plan, and what its fullest device holds. `release`: of megatron-core. `today`: the
    launch's setting, which gets the first row whatever it holds."""
    none, full = priced(job, profile, NONE), priced(job, profile, FULL)
    found = sorted(rivals(job, profile, budget_bytes, release), key=lambda price: (price.step_s, price.most_bytes))
    others = [price for price in found if price.setting not in (NONE, FULL)]
    added_s = update_s(job, profile)
    none_s = none.step_s + added_s
    rows = [_row(price, none_s, added_s) for price in (none, full, *others[:STRONGEST])]
    if today is not None:
        first = _row(priced(job, profile, today), none_s, added_s)
        rows = [replace(first, setting=f"today: {first.setting}"), *(row for row in rows if row.setting != first.setting)]
    ours = SimulatedRow("ours", True, ours_s, ours_s / none_s, ours_bytes, 0, ())
    return [*rows, ours]


def _row(price: Priced, none_s: float, added_s: float) -> SimulatedRow:
    """`added_s`: of the update, the same for all settings."""
    setting, step_s = price.setting, price.step_s + added_s
    figures = (step_s, step_s / none_s, price.most_bytes, price.host_bytes)
    return SimulatedRow(f"stock {setting.name}", False, *figures, setting.flags)


def verdict(rows: list[SimulatedRow], budget_bytes: int) -> str:
    """How ours compares with the fastest of stock that fits."""
    ours = next(row for row in rows if row.ours)
    small = [row for row in rows if not row.ours and row.device_bytes <= budget_bytes]
    best = min(small, key=lambda row: row.step_s, default=None)
    if best is None:
        return f"No stock setting fits into {format_bytes(budget_bytes)}."
    gain = best.step_s / ours.step_s
    how = f"{gain:.2f} times as fast as" if gain >= 1 else f"slower, by a factor of {1 / gain:.2f}, than"
    flags = " ".join(best.flags) or "no flags"
    return f"ours is {how} {best.setting}, the fastest stock setting that fits into {format_bytes(budget_bytes)} ({flags})."
