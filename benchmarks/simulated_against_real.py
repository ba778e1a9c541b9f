"""Is the simulator right? Simulated against measured seconds of a step, for several plans of one job.

    python -m benchmarks.simulated_against_real jobs/demo -o benchmarks/results

The job's profile is measured first (one layer, the ends of the model, its messages). From it alone every plan is simulated. Then
all plans train in the same processes, in turns; a time is the median over rounds of the slowest rank's step. The optimizer is
in neither. `formula` is the planner's closed form (`cost.stage.step_s`) for the plans that the planner makes, for comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from megatron_lynx.config import load_job
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.measure.machine import this_machine
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import make_plan, uniform_plan
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.testbed.candidates import NONE, Candidate, without_windows
from megatron_lynx.testbed.place import Place, place_for
from megatron_lynx.testbed.profiling import measure_profile
from megatron_lynx.testbed.race import Lap, race
from megatron_lynx.units import MIB

NORMS_AND_ACTIVATION = ("input_layernorm", "pre_mlp_layernorm", "activation")
"""The balanced policy of Yuan et al."""


@dataclass(frozen=True)
class Row:
    """One plan. Seconds of one step."""

    plan: str
    simulated_s: float
    measured_s: float
    lowest_s: float
    highest_s: float
    """The fastest and the slowest round."""
    formula_s: float | None

    @property
    def error(self) -> float:
        """Of the simulation, relative to what was measured."""
        return self.simulated_s / self.measured_s - 1

    @property
    def formula_error(self) -> float | None:
        return None if self.formula_s is None else self.formula_s / self.measured_s - 1


def plans_of(job: Job, profile: Profile) -> dict[str, Plan]:
    """From no recomputation to as much as there is, in windows and on demand, uniform and as the planner chooses."""
    everything = uniform_plan(job)
    kept_bytes = rehearse(uniform_plan(job, "none"), profile).memory(0).peak_bytes
    plans = {
        "everything, windows": everything,
        "everything, on demand": without_windows(everything),
        "norms and activation, windows": uniform_plan(job, NORMS_AND_ACTIVATION),
        "norms and activation, on demand": without_windows(uniform_plan(job, NORMS_AND_ACTIVATION)),
        "attention, on demand": without_windows(uniform_plan(job, ("core_attention",))),
        "planned, least memory": make_plan(job.model_copy(update={"budget": Budget()}), profile),
    }
    for share in (0.5, 0.75):
        budget = Budget(activation_mib=share * kept_bytes / MIB)
        plans[f"planned, {share:.0%} of no recomputation's memory"] = make_plan(
            job.model_copy(update={"budget": budget}), profile
        )
    return plans


def rows(job: Job, profile: Profile, place: Place, rounds: int) -> list[Row]:
    plans = plans_of(job, profile)
    candidates = [NONE, *(Candidate(name, plan=plan) for name, plan in plans.items())]
    laps: list[dict[str, Lap]] = place.run(race, job, candidates, rounds, 1)
    simulated = {NONE.name: uniform_plan(job, "none")} | plans
    return [_row(name, plan, profile, laps) for name, plan in simulated.items()]


def _row(name: str, plan: Plan, profile: Profile, laps: list[dict[str, Lap]]) -> Row:
    steps = [max(ranks) for ranks in zip(*(lap[name].step_s for lap in laps), strict=True)]
    simulation = rehearse(plan, profile)
    return Row(
        plan=name,
        simulated_s=simulation.step_s,
        measured_s=statistics.median(steps),
        lowest_s=min(steps),
        highest_s=max(steps),
        formula_s=plan.stages[0].predicted.step_s,
    )


def markdown(job_name: str, found: list[Row], words: str) -> str:
    lines = [f"# Simulated against real: {job_name}", "", f"{date.today()}; {words}.", "", *(__doc__ or "").splitlines()[4:], ""]
    lines += [
        "| plan | simulated s | measured s (lowest, highest) | error | formula s | its error |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for each in found:
        measured = f"{each.measured_s:.3f} ({each.lowest_s:.3f}, {each.highest_s:.3f})"
        formula = "- | -" if each.formula_s is None else f"{each.formula_s:.3f} | {each.formula_error:+.1%}"
        lines.append(f"| {each.plan} | {each.simulated_s:.3f} | {measured} | {each.error:+.1%} | {formula} |")
    errors = [abs(each.error) for each in found]
    lines += ["", f"Mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", help="a job file, or a bundled one: jobs/demo")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    job = load_job(chosen.job)
    with place_for(job) as place:
        profile = measure_profile(job, place, lambda what: nullcontext())
        found = rows(job, profile, place, chosen.rounds)
        machine = this_machine(place.links, "cpu")
    text = markdown(chosen.job, found, f"{machine}; {place.ranks} ranks; {chosen.rounds} rounds")
    stem = chosen.output / f"{date.today()}-simulated-{Path(chosen.job).stem}"
    stem.with_suffix(".md").write_text(text)
    shown = [{**asdict(each), "error": each.error, "formula_error": each.formula_error} for each in found]
    answer = {"machine": machine.model_dump(), "rounds": chosen.rounds, "rows": shown, "profile": profile.model_dump(mode="json")}
    stem.with_suffix(".json").write_text(json.dumps(answer, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
