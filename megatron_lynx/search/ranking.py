"""What a search answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.search.candidate import Candidate
from megatron_lynx.search.losers import Lost


@dataclass(frozen=True)
class Ranking:
    """`candidates`: the fastest first, each the best of its layout. `losers`: all others, in families. `best_of`: the fastest of
    each schedule that was asked for and fits, where gradients may be older."""

    job: Job
    gpus: int
    candidates: tuple[Candidate, ...]
    considered: int
    """Layouts times micro-batch sizes times policies."""
    losers: tuple[Lost, ...]
    seconds: float
    """That the search took."""
    best_of: tuple[Candidate, ...] = ()

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "gpus": self.gpus,
            "budget_bytes": self.job.memory_budget_bytes,
            "candidates": [candidate.as_json for candidate in self.candidates],
            **({"best_of_schedules": [candidate.as_json for candidate in self.best_of]} if self.best_of else {}),
            "considered": self.considered,
            "losers": [lost.as_json for lost in self.losers],
            "seconds": self.seconds,
        }
