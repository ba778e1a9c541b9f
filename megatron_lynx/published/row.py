"""One published figure beside ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """A published figure and ours. `bound` is on the error's absolute value, in its unit; None: nothing is claimed."""

    source: str
    what: str
    published: float
    computed: float
    unit: str
    bound: float | None
    error_in: Literal["percent", "unit"] = "percent"
    """Whether the error is relative, or the plain difference."""
    calibrates: str | None = None
    """The constant that this row, with the others that name it, chose: what is left of its error says nothing."""

    @property
    def error(self) -> float:
        """Ours less theirs."""
        difference = self.computed - self.published
        return 100 * difference / self.published if self.error_in == "percent" else difference

    @property
    def within(self) -> bool | None:
        """Whether the error is within its bound, if it has one. Bounds are printed figures, so rounding is allowed for."""
        return None if self.bound is None else abs(self.error) <= self.bound + 1e-9

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "row": self.what,
            "published": self.published,
            "computed": self.computed,
            "unit": self.unit,
            "error": self.error,
            "error_unit": "%" if self.error_in == "percent" else self.unit,
            "bound": self.bound,
            "within": self.within,
            "calibrates": self.calibrates,
        }
