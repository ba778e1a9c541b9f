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

from megatron_lynx.measure.measurement import Measurement, Setting
from megatron_lynx.units import format_bytes, format_seconds

Bytes = Literal["resident_bytes", "peak_bytes"]

IN_WORDS: dict[Bytes, str] = {"resident_bytes": "activation bytes", "peak_bytes": "peak bytes"}

SHOWN = ("peak_bytes", "on_demand_s", "offloaded_bytes", "host_bytes", "exposed_copy_s")
"""Figures of a setting that programs get under their own names."""


def as_json(measurement: Measurement) -> dict[str, Any]:
    """What `megatron-lynx compare --json` prints: a row for each setting, in the measurement's order. Seconds are medians."""
    return {"rows": [_row(measurement, setting) for setting in measurement.settings]}


def _row(measurement: Measurement, setting: Setting) -> dict[str, Any]:
    figures = setting.figures
    return {
        "setting": setting.name,
        "step_s": setting.step.median_s,
        "ratio_to_none": measurement.ratio_to_none(setting),
        "activation_bytes": figures.resident_bytes,
        "exposed_s": measurement.exposed_s(setting),
        **{name: getattr(figures, name) for name in SHOWN},
        "gradients_equal": setting.gradients_equal,
    }


@dataclass(frozen=True)
class Verdict:
    """The fastest setting of ours against the fastest stock one that needs no more bytes (none: every stock one needs more)."""

    ours: Setting
    opponent: Setting | None
    by: Bytes

    @property
    def speedup(self) -> float | None:
        """Opponent's seconds over ours: above 1, ours is faster."""
        return None if self.opponent is None else self.opponent.step.median_s / self.ours.step.median_s

    def __str__(self) -> str:
        what, ours = IN_WORDS[self.by], self._in_words(self.ours)
        if self.opponent is None or self.speedup is None:
            return f"No stock setting that was measured needs as few {what} as {ours}."
        stock = self._in_words(self.opponent)
        if self.speedup >= 1:
            won = f"is {self.speedup:.2f} times as fast as {stock}"
        else:
            won = f"is slower, by a factor of {1 / self.speedup:.2f}, than {stock}"
        return f"{ours} {won}, the fastest stock setting of no more {what}."

    def _in_words(self, setting: Setting) -> str:
        return f"{setting.name} ({format_seconds(setting.step.median_s)}, {format_bytes(getattr(setting.figures, self.by))})"


def verdict(settings: Iterable[Setting], by: Bytes = "resident_bytes") -> Verdict | None:
    """How our fastest setting compares. None where nothing of ours, or nothing of stock's, was measured."""
    settings = tuple(settings)
    ours = min((each for each in settings if each.ours), key=lambda each: each.step.median_s, default=None)
    stock = [each for each in settings if not each.ours]
    if ours is None or not stock:
        return None
    small = (each for each in stock if getattr(each.figures, by) <= getattr(ours.figures, by))
    return Verdict(ours, min(small, key=lambda each: each.step.median_s, default=None), by)
