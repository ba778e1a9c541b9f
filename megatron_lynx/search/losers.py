"""Losing candidates by reason: their number, and the best of each reason next to the winner.

cannot run     no plan can express the layout
not asked      plans with context parallelism, which need `--context` or a job that has it
micro-batches  fewer than stages, too few for two versions of the weights
no plan        everything fits, so a plan would equal policy `none`
state          parameters, gradients and optimizer alone do not fit
activations    does not fit with everything offloaded
host memory    the host has too little memory for the offloaded tensors
slower         by the part that exceeds the winner's most: compute, recompute, communication, bubble, copies

Layouts without flushes are counted separately.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megatron_lynx.config.job import Job
from megatron_lynx.search.candidate import Spent, in_words, sizes
from megatron_lynx.units import format_bytes, format_seconds

OF_BYTES = ("state", "activations", "host memory")
WITHOUT_FLUSHES = ", double-buffered"
NO_NUMBERS = ("cannot run", "not asked", "no plan")
REASONS = (*NO_NUMBERS, "micro-batches", *OF_BYTES, "compute", "recompute", "communication", "bubble", "copies")


@dataclass(frozen=True)
class Lost:
    """One reason with its best example: the fastest, or the one with the smallest excess.

    `figure` and `limit`: seconds of a part of its step and of the winner's, bytes and the budget, or micro-batches and stages; 0
    for reasons without figures.
    """

    reason: str
    count: int
    example: str
    figure: float
    limit: float
    unit: Literal["bytes", "seconds", "micro-batches"]

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def numbers(self) -> str:
        if self.reason.removesuffix(WITHOUT_FLUSHES) in NO_NUMBERS:
            return ""
        if self.unit == "micro-batches":
            return f"{self.figure:g}, at least {self.limit:g}"
        if self.unit == "bytes":
            return f"{format_bytes(self.figure)}, at most {format_bytes(self.limit)}"
        return f"{format_seconds(self.figure)}, the best spends {format_seconds(self.limit)}"


@dataclass
class Losers:
    _counts: Counter[str] = field(default_factory=Counter)
    _best: dict[str, tuple[float, Job, float, float]] = field(default_factory=dict)

    def add(self, reason: str, job: Job, figure: float, limit: float, *, rank: float | None = None, count: int = 1) -> None:
        """`rank`: the least is the example (default `figure`); the first of equals stays."""
        reason += WITHOUT_FLUSHES if job.schedule == "double_buffered" else ""
        self._counts[reason] += count
        rank = figure if rank is None else rank
        if reason not in self._best or rank < self._best[reason][0]:
            self._best[reason] = rank, job, figure, limit

    def slower(self, job: Job, spent: Spent, winner: Spent) -> None:
        """Count a slower candidate, by the part with the most seconds over the winner's."""
        spent_s, winner_s = vars(spent), vars(winner)
        name = max(spent_s, key=lambda part: spent_s[part] - winner_s[part])
        self.add(name.removesuffix("_s"), job, spent_s[name], winner_s[name], rank=spent.total_s)

    def families(self) -> tuple[Lost, ...]:
        reasons = (reason + suffix for reason in REASONS for suffix in ("", WITHOUT_FLUSHES))
        return tuple(self._family(reason) for reason in reasons if reason in self._counts)

    def _family(self, reason: str) -> Lost:
        _, job, figure, limit = self._best[reason]
        kind = reason.removesuffix(WITHOUT_FLUSHES)
        example = sizes(job) if kind == "state" else in_words(job)
        unit: Literal["bytes", "seconds", "micro-batches"] = "bytes" if kind in OF_BYTES else "seconds"
        return Lost(reason, self._counts[reason], example, figure, limit, "micro-batches" if kind == "micro-batches" else unit)
