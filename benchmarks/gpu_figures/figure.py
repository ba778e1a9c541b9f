"""One figure: what the package states, and what was measured. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DIFFERS = 0.08
"""The part of the stated figure from which on a measured one is said to differ."""


@dataclass(frozen=True)
class Figure:
    """Something that is stated and was measured, both in `unit`."""

    of: str
    what: str
    stated: float
    measured: float
    unit: str

    @property
    def ratio(self) -> float | None:
        """Measured over stated; None where nothing is stated."""
        return self.measured / self.stated if self.stated else None

    @property
    def differs(self) -> bool:
        return abs(self.measured - self.stated) > DIFFERS * self.stated


@dataclass
class Part:
    """What became of one part of the run."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0

    @property
    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "figures": [{**vars(each), "ratio": each.ratio} for each in self.figures]}


def page(parts: Sequence[Part], facts: Mapping[str, str]) -> str:
    """All parts in Markdown: those figures first that differ, by unit and the largest difference first."""
    lines = ["# Figures of one GPU", "", *(f"* {name}: {said}" for name, said in facts.items()), ""]
    differing = [each for part in parts for each in part.figures if each.differs]
    differing.sort(key=lambda each: (each.unit, -abs(each.measured - each.stated)))
    lines += [f"## More than {DIFFERS:.0%} away from what is stated", "", *table(differing), ""]
    for part in parts:
        lines += [f"## {part.name} ({part.seconds:.0f} s)", "", *(f"* {note}" for note in part.notes)]
        lines += [f"* failed: {' '.join(part.error.split())}"] if part.error else []
        lines += ["", *table(part.figures), ""]
    return "\n".join(lines)


def table(figures: Iterable[Figure]) -> list[str]:
    rows = ["| of | what | stated | measured | unit | measured / stated |", "|---|---|--:|--:|---|--:|"]
    for each in figures:
        ratio = "" if each.ratio is None else f"{each.ratio:.3f}"
        rows.append(f"| {each.of} | {each.what} | {each.stated:.4g} | {each.measured:.4g} | {each.unit} | {ratio} |")
    return rows
