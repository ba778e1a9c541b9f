"""Comparing a plan with stock Megatron: a row for each setting, and the sentence that sums them up.

setting          step_s  ratio  resident bytes  peak bytes
stock none        1.00   1.00      100             120          the reference
stock full        1.40   1.40       10              40          ┐ no more bytes than ours:
stock block-2     1.20   1.20       50              70          │ opponents, of which the fastest counts
ours              1.01   1.01       18              45          ┘ (here full: block-2 holds more)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from megatron_lynx.measure.measurement import Measurement
from megatron_lynx.units import format_bytes, format_seconds

Bytes = Literal["activation_bytes", "peak_bytes"]


@dataclass(frozen=True)
class Row:
    """One setting of a comparison. Bytes are of the rank that needs most; seconds are medians of the slowest rank's."""

    setting: str
    ours: bool
    step_s: float
    step_lower_s: float
    step_upper_s: float
    """The lower and the upper quartile of a step's seconds."""
    ratio_to_none: float
    activation_bytes: int
    """Resident between forward and backward."""
    peak_bytes: int
    exposed_s: float
    on_demand_s: float | None
    hidden_replays: int
    on_demand_replays: int
    offloaded_bytes: int
    host_bytes: int
    exposed_copy_s: float
    gradients_equal: bool | None


def rows_of(measurement: Measurement) -> tuple[Row, ...]:
    """One row for each setting, in the measurement's order."""
    return tuple(
        Row(
            setting=setting.name,
            ours=setting.ours,
            step_s=setting.step.median_s,
            step_lower_s=setting.step.lower_s,
            step_upper_s=setting.step.upper_s,
            ratio_to_none=measurement.ratio_to_none(setting),
            activation_bytes=setting.resident_bytes,
            peak_bytes=setting.peak_bytes,
            exposed_s=measurement.exposed_s(setting),
            on_demand_s=setting.on_demand_s,
            hidden_replays=setting.hidden_replays,
            on_demand_replays=setting.on_demand_replays,
            offloaded_bytes=setting.offloaded_bytes,
            host_bytes=setting.host_bytes,
            exposed_copy_s=setting.exposed_copy_s,
            gradients_equal=setting.gradients_equal,
        )
        for setting in measurement.settings
    )


JSON_KEYS = (
    "setting",
    "step_s",
    "ratio_to_none",
    "activation_bytes",
    "peak_bytes",
    "exposed_s",
    "on_demand_s",
    "offloaded_bytes",
    "host_bytes",
    "exposed_copy_s",
    "gradients_equal",
)


def as_json(rows: Iterable[Row]) -> dict[str, Any]:
    """What `megatron-lynx compare --json` prints."""
    return {"rows": [{key: getattr(row, key) for key in JSON_KEYS} for row in rows]}


@dataclass(frozen=True)
class Verdict:
    """The fastest setting of ours against the fastest stock one that needs no more bytes (none: every stock one needs more)."""

    ours: Row
    opponent: Row | None
    by: Bytes

    @property
    def speedup(self) -> float | None:
        """Opponent's seconds over ours: above 1, ours is faster."""
        return None if self.opponent is None else self.opponent.step_s / self.ours.step_s

    def __str__(self) -> str:
        what = "activation bytes" if self.by == "activation_bytes" else "peak bytes"
        ours = f"{self.ours.setting} ({format_seconds(self.ours.step_s)}, {format_bytes(getattr(self.ours, self.by))})"
        if self.opponent is None or self.speedup is None:
            return f"No stock setting that was measured needs as few {what} as {ours}."
        held = format_bytes(getattr(self.opponent, self.by))
        stock = f"{self.opponent.setting} ({format_seconds(self.opponent.step_s)}, {held})"
        if self.speedup >= 1:
            won = f"is {self.speedup:.2f} times as fast as {stock}"
        else:
            won = f"is slower, by a factor of {1 / self.speedup:.2f}, than {stock}"
        return f"{ours} {won}, the fastest stock setting of no more {what}."


def verdict(rows: Iterable[Row], by: Bytes = "activation_bytes") -> Verdict | None:
    """How our fastest setting compares. None where nothing of ours, or nothing of stock's, was measured."""
    rows = tuple(rows)
    ours = min((row for row in rows if row.ours), key=lambda row: row.step_s, default=None)
    stock = [row for row in rows if not row.ours]
    if ours is None or not stock:
        return None
    small = (row for row in stock if getattr(row, by) <= getattr(ours, by))
    return Verdict(ours, min(small, key=lambda row: row.step_s, default=None), by)
