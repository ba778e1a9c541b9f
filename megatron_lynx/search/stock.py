"""Candidates whose policy is stock Megatron's, or needs no plan: kept, selective, balanced, full."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_lynx.cost.step import step_seconds, update_s
from megatron_lynx.search.candidate import Candidate
from megatron_lynx.search.entry import Entry
from megatron_lynx.search.fit import Excess, Fits, fit
from megatron_lynx.search.simulated import pipeline_s, simulated_spent


@dataclass(frozen=True)
class Floored(Entry):
    """What it takes at least, if nothing has to be copied. `offload`: whether activations may go to the host."""

    offload: bool

    def closer(self) -> Fitting | Excess:
        fits = fit(self.job, self.offload)
        if isinstance(fits, Excess):
            return fits
        job = self.job.model_copy(update={"offload_ratio": fits.offload_ratio})
        step = step_seconds(job, self.cost.profile, fits.offload_ratio)
        messages_s = self.spent.communication_s + step.total_s - step.copies_s - self.spent.total_s  # those that hold up a stage
        return Fitting(job, self.cost, replace(self.spent, communication_s=messages_s, copies_s=step.copies_s), fits)


@dataclass(frozen=True)
class Fitting(Entry):
    """What it takes by the closed form."""

    fit: Fits

    def closer(self) -> Candidate:
        """Simulated. The closed form alone knows that copies and messages take turns: no less than it says."""
        profile, ratio = self.cost.profile, self.fit.offload_ratio
        step_s = max(pipeline_s(self.job, profile, ratio) + update_s(self.job), self.spent.total_s)
        return Candidate(self.job, step_s, simulated_spent(self.job, self.spent, step_s), ratio, self.fit.memory.total)
