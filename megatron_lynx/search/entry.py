"""A candidate on its way through the search: what is known of it so far, and how to look closer.

    StockFloored ──> StockFitting ──> Candidate               policies that need no plan
    Floored ──> Ends ──> AllStages ──> Candidate              plans (`search.planned`)
        └──────────┴─────────┴──> Excess: does not fit         └──> None: nothing needs to be replayed or copied

The seconds that are known of a candidate only grow from look to look.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from megatron_lynx.config.job import Job
from megatron_lynx.cost.step import step_seconds
from megatron_lynx.cost.update import update_s
from megatron_lynx.search.candidate import Candidate, Spent
from megatron_lynx.search.fit import Excess, Fits, fit
from megatron_lynx.search.floor import LayerCost
from megatron_lynx.search.simulated import pipeline_s, simulated_spent


@dataclass(frozen=True)
class Entry(ABC):
    """`spent`: a lower bound of where its seconds go."""

    job: Job
    cost: LayerCost
    spent: Spent

    @abstractmethod
    def closer(self) -> Entry | Candidate | Excess | None:
        """What the next look finds."""


@dataclass(frozen=True)
class StockFloored(Entry):
    """What a stock policy takes at least, if nothing has to be copied. `offload`: whether activations may go to the host."""

    offload: bool

    def closer(self) -> StockFitting | Excess:
        fits = fit(self.job, self.offload)
        if isinstance(fits, Excess):
            return fits
        job = self.job.model_copy(update={"offload_ratio": fits.offload_ratio})
        step = step_seconds(job, self.cost.profile, fits.offload_ratio)
        messages_s = self.spent.communication_s + step.total_s - step.copies_s - self.spent.total_s  # those that hold up a stage
        return StockFitting(job, self.cost, replace(self.spent, communication_s=messages_s, copies_s=step.copies_s), fits)


@dataclass(frozen=True)
class StockFitting(Entry):
    """What a stock policy that fits takes by the closed form."""

    fit: Fits

    def closer(self) -> Candidate:
        """Simulates it. The closed form alone knows that copies and messages take turns, so no less than it says is taken."""
        profile, ratio = self.cost.profile, self.fit.offload_ratio
        step_s = max(pipeline_s(self.job, profile, ratio) + update_s(self.job, profile), self.spent.total_s)
        return Candidate(self.job, step_s, simulated_spent(self.job, self.spent, step_s), ratio, self.fit.memory.total)
