"""Says which is expected to be faster: a launch with userbuffers, or the same one without them, each under its own plan.

    with userbuffers       exchanges hide behind their GEMMs, as far as they do      a plan has no tensor-parallel windows, and
                                                                                     replays no linear
    without                exchanges are waited for                                  replays run while they are

How much userbuffers hide nobody can say beforehand: between what stock hides without them, and everything that is no longer than
its GEMM. So their step is a range, and the answer may be one, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_lynx.config.job import Job
from megatron_lynx.cost.step_range import hiding_all
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import Infeasible
from megatron_lynx.planner.decision import Decision, decide
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.units import format_seconds


@dataclass(frozen=True)
class AgainstWindows:
    """One step under each plan, the optimizer's update included."""

    at_worst: Decision
    """With userbuffers that hide nothing more than stock hides without them."""
    at_best: Decision
    """The same plan, with userbuffers that hide every exchange behind its GEMM, as far as that lasts."""
    without: Decision | None
    """Without userbuffers. None: no plan fits the budget then."""
    update_s: float
    """Of each step."""

    @property
    def at_worst_s(self) -> float:
        return self.at_worst.simulation.step_s + self.update_s

    @property
    def at_best_s(self) -> float:
        return self.at_best.simulation.step_s + self.update_s

    @property
    def without_s(self) -> float | None:
        return None if self.without is None else self.without.simulation.step_s + self.update_s

    @property
    def faster(self) -> Literal["with", "without", "either"]:
        """Which launch is expected to be faster; `either` where it depends on how much userbuffers hide."""
        if self.without_s is None or self.without_s >= self.at_worst_s:
            return "with"
        return "without" if self.without_s <= self.at_best_s else "either"

    @property
    def needed_share(self) -> float | None:
        """The share that userbuffers must hide of what they could, for both to be as fast; None where none decides."""
        if self.faster != "either" or self.without_s is None:
            return None
        return (self.at_worst_s - self.without_s) / (self.at_worst_s - self.at_best_s)

    @property
    def in_words(self) -> str:
        best, worst = (format_seconds(seconds) for seconds in (self.at_best_s, self.at_worst_s))
        ours = f"with userbuffers {best} to {worst}, by how much they hide"
        if self.without_s is None:
            return f"{ours}; without them no plan fits"
        verdict = {
            "with": "with them is expected to be faster",
            "without": "without them is expected to be faster: drop --tp-comm-overlap, and make a plan for that",
            "either": f"with them is faster if they hide more than {self.needed_share or 0.0:.0%} of what they could",
        }
        return f"{ours}; without them, under a plan with windows, {format_seconds(self.without_s)}: {verdict[self.faster]}"

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "step_at_worst_s": self.at_worst_s,
            "step_at_best_s": self.at_best_s,
            "step_without_s": self.without_s,
            "faster": self.faster,
            "needed_share": self.needed_share,
        }


def against_windows(decision: Decision, job: Job, profile: Profile) -> AgainstWindows | None:
    """The comparison for a job that was decided about; None where it has no userbuffers."""
    if not job.userbuffers:
        return None
    hidden = rehearse(decision.plan, hiding_all(profile), job=decision.job)
    overlap = job.overlap.model_copy(update={"userbuffers": False})
    try:
        without = decide(job.model_copy(update={"overlap": overlap}), profile)
    except Infeasible:
        without = None
    return AgainstWindows(decision, replace(decision, simulation=hidden), without, update_s(decision.job, profile))
