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


DENSE, X


def precision(*, experts: bool) -> Precision:
    return WITH_EXPERTS if experts else DENSE
