"""Is the simulator right? Simulated against measured seconds and bytes of a step, for several plans of one job.

    python -m benchmarks.simulated_against_real jobs/demo -o benchmarks/results

The job's profile (one layer, the ends of the model, its messages) is measured before and after; a simulated time is the mean of
what the two make of a plan, and nothing else is known of the machine. Drift: seconds of a layer after, over seconds before. In
between all plans train in the same processes, in turns; a time is the median over rounds of the slowest rank's step, a ratio the
median over rounds of that step over stock none's of the same round. The optimizer is in neither.

Bytes are what the first stage holds between forward and backward of its first micro-batch. Simulated: what its layers keep, and
the ends of the model. Measured, in a step of its own: what the allocator reports beyond the level before the step.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from benchmarks.resident_bytes import count
from benchmarks.results_folder import results_folder
from megatron_lynx.config import load_job
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.kinds.dense.section import ACTIVATION, CORE_ATTENTION, DENSE
from megatron_lynx.measure.measurement import this_machine
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.testbed.candidates import NONE, Candidate, without_windows
from megatron_lynx.testbed.comparison import Lap, race
from megatron_lynx.testbed.profiling import measure_profile
from megatron_lynx.testbed.ranks import Hosts, hosts_for
from megatron_lynx.units import MIB
from tests.uniform import uniform_plan

NORMS_AND_ACTIVATION = (*(section.norm for section in DENSE.values()), ACTIVATION)
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
    simulated_ratio: float
    """Ratio to stock none, as is `measured_ratio`."""
    measured_ratio: float
    simulated_bytes: int
    measured_bytes: int

    @property
    def ratio_error(self) -> float:
        return self.simulated_ratio / self.measured_ratio - 1

    @property
    def error(self) -> float:
        """Error of the simulated seconds, relative to the measured ones."""
        return self.simulated_s / self.measured_s - 1

    @property
    def bytes_error(self) -> float:
        return self.simulated_bytes / self.measured_bytes - 1


def plans_of(job: Job, profile: Profile) -> dict[str, Plan]:
    """From no recomputation to as much as there is, in windows and on demand, uniform and as the planner chooses."""
    everything = uniform_plan(job)
    kept_bytes = rehearse(uniform_plan(job, "none"), profile).memory(0).peak_bytes
    plans = {
        "everything, windows": everything,
        "everything, on demand": without_windows(everything),
        "norms and activation, windows": uniform_plan(job, NORMS_AND_ACTIVATION),
        "norms and activation, on demand": without_windows(uniform_plan(job, NORMS_AND_ACTIVATION)),
        "attention, on demand": without_windows(uniform_plan(job, (CORE_ATTENTION,))),
        "planned, least memory": make_plan(job.model_copy(update={"budget": Budget()}), profile),
    }
    for share in (0.5, 0.75):
        budget = Budget(activation_mib=share * kept_bytes / MIB)
        plans[f"planned, {share:.0%} of no recomputation's memory"] = make_plan(
            job.model_copy(update={"budget": budget}), profile
        )
    return plans


@dataclass(frozen=True)
class Trained:
    """What was measured of every plan, by its name."""

    held_bytes: dict[str, int]
    step_s: dict[str, list[float]]
    """Seconds of the slowest rank in each round."""


def train(job: Job, plans: dict[str, Plan], hosts: Hosts, rounds: int) -> Trained:
    candidates = [NONE, *(Candidate(name, plan=plan) for name, plan in plans.items())]
    held: list[dict[str, int]] = hosts.run(count, job, candidates)
    laps: list[dict[str, Lap]] = hosts.run(race, job, candidates, rounds, 1)
    names = [each.name for each in candidates]
    return Trained(
        held[0], {name: [max(ranks) for ranks in zip(*(lap[name].step_s for lap in laps), strict=True)] for name in names}
    )


def rows(plans: dict[str, Plan], profiles: tuple[Profile, Profile], trained: Trained) -> list[Row]:
    simulated = {name: statistics.mean(rehearse(plan, each).step_s for each in profiles) for name, plan in plans.items()}
    none_s = trained.step_s[NONE.name]
    return [
        Row(
            plan=name,
            simulated_s=simulated[name],
            measured_s=statistics.median(trained.step_s[name]),
            lowest_s=min(trained.step_s[name]),
            highest_s=max(trained.step_s[name]),
            simulated_ratio=simulated[name] / simulated[NONE.name],
            measured_ratio=statistics.median(map(operator.truediv, trained.step_s[name], none_s)),
            simulated_bytes=resident_bytes(plan, profiles[0]),
            measured_bytes=trained.held_bytes[name],
        )
        for name, plan in plans.items()
    ]


def resident_bytes(plan: Plan, profile: Profile) -> int:
    """What the first stage keeps of its first micro-batch when that one's forward is over."""
    layers = sum(change for _, change in rehearse(plan, profile).executed[0][0].content.memory)
    alone = plan.parallel.pipeline == 1
    return layers + profile.embedding.saved_bytes + (profile.head.saved_bytes if alone else 0)


def layer_s(profile: Profile) -> float:
    return sum(half.forward_s + half.backward_s for half in (profile.attention, profile.mlp))


def markdown(job_name: str, found: list[Row], words: str) -> str:
    lines = [f"# Simulated against real: {job_name}", "", f"{date.today()}; {words}.", "", *(__doc__ or "").splitlines()[4:], ""]
    lines += ["| plan | simulated s | measured s (lowest, highest) | error | to none: simulated | measured | error |"]
    lines[-1] += " simulated MiB | measured | error |"
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for each in found:
        measured = f"{each.measured_s:.3f} ({each.lowest_s:.3f}, {each.highest_s:.3f})"
        ratios = f"{each.simulated_ratio:.3f} | {each.measured_ratio:.3f} | {each.ratio_error:+.1%}"
        sizes = f"{each.simulated_bytes / MIB:.1f} | {each.measured_bytes / MIB:.1f} | {each.bytes_error:+.1%}"
        lines.append(f"| {each.plan} | {each.simulated_s:.3f} | {measured} | {each.error:+.1%} | {ratios} | {sizes} |")
    summary = [
        _summary("step", [row.error for row in found]),
        _summary("ratio to none", [row.ratio_error for row in found[1:]]),
        _summary("bytes", [row.bytes_error for row in found]),
    ]
    return "\n".join([*lines, "", *summary])


def _summary(name: str, errors: list[float]) -> str:
    return f"Error of the {name}: mean {statistics.mean(map(abs, errors)):.1%}, worst {max(map(abs, errors)):.1%}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", help="a job file, or a bundled one: jobs/demo")
    parser.add_argument("-o", "--output", type=results_folder, required=True, help="folder")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    job = load_job(chosen.job)
    hosts = hosts_for(job)
    before = measure_profile(job, hosts, lambda what: nullcontext())
    plans = plans_of(job, before)
    trained = train(job, plans, hosts, chosen.rounds)
    after = measure_profile(job, hosts, lambda what: nullcontext())
    machine = this_machine(hosts.links, "cpu")
    found = rows({NONE.name: uniform_plan(job, "none")} | plans, (before, after), trained)
    drift = layer_s(after) / layer_s(before)
    text = markdown(chosen.job, found, f"{machine}; {hosts.ranks} ranks; {chosen.rounds} rounds; drift {drift:.3f}")
    stem = chosen.output / f"{date.today()}-simulated-{Path(chosen.job).stem}"
    stem.with_suffix(".md").write_text(text)
    shown = [
        {**asdict(each), "error": each.error, "ratio_error": each.ratio_error, "bytes_error": each.bytes_error} for each in found
    ]
    answer = {
        "machine": machine.model_dump(),
        "rounds": chosen.rounds,
        "drift": drift,
        "rows": shown,
        "profiles": [each.model_dump(mode="json") for each in (before, after)],
    }
    stem.with_suffix(".json").write_text(json.dumps(answer, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
