"""A candidate on its way through the search: what is known of it so far, and how to look closer.

    Floored ──> Fitting ──> Candidate                            stock policies     `stock`
    Floored ──> Ends ──> AllStages ──> Candidate                 plans              `planned`
        └──────────┴──────────────┴──> Excess: does not fit       └──> None: nothing needs to be replayed or copied

What is known of a candidate's seconds only grows from look to look.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.search.candidate import Candidate
from megatron_lynx.search.fit import Excess
from megatron_lynx.search.floor import LayerCost
from megatron_lynx.search.spent import Spent


@dataclass(frozen=True)
class Entry(ABC):
    """`spent`: no more than it will turn out to be."""

    job: Job
    cost: LayerCost
    spent: Spent

    @abstractmethod
    def closer(self) -> Entry | Candidate | Excess | None: ...
