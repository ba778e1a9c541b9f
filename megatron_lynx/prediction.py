"""How far predictions of published runs of grade A are off: mean errors of `validate --leave-one-out`, by family of models."""

from __future__ import annotations

from typing import NamedTuple


class Precision(NamedTuple):
    family: str
    steps: float
    """Mean error of a step, either way."""
    ratios: float
    """Mean error of the ratio of two settings' steps."""
    layouts: float | None = None
    """Mean error of the ratio of two layouts' steps, if it differs from `ratios`."""

    @property
    def in_words(self) -> str:
        if self.layouts is not None:
            ratios = f"ratios of settings {100 * self.ratios:.0f} %, layouts {100 * self.layouts:.0f} %"
            return f"published steps {self.family} are {100 * self.steps:.0f} % off; {ratios}"
        return f"published steps {self.family} are {100 * self.steps:.0f} % off, either way; ratios {100 * self.ratios:.0f} %"


DENSE, WITH_EXPERTS = Precision("of dense models", 0.035, 0.02), Precision("with experts", 0.06, 0.03, 0.21)


def precision(*, experts: bool) -> Precision:
    return WITH_EXPERTS if experts else DENSE


EVEN = 0.0005
"""Relative difference below which no figure is printed."""


def within_error(step_s: float, other_s: float, *, experts: bool, layouts: bool = False) -> str:
    """Return a sentence if two steps differ by less than the error of their ratio, otherwise nothing. `layouts`: whether they
    differ in layout or batch."""
    known = precision(experts=experts)
    off = known.layouts or known.ratios if layouts else known.ratios
    if not EVEN < abs(1 - step_s / other_s) < off:
        return ""
    return f"That is within the error of such ratios, {100 * off:.0f} %: measure both."
