"""What keeping activations in host memory costs: a step against stock none, and what the device holds, share by share.

    python -m benchmarks.offload_sweep -o benchmarks/results

Two ranks, each on a core of its own: two stages of four chunks, interleaved, so that the first stage has nine chunks in flight.
Plans are the planner's; nothing is replayed. All shares train in the same processes, in turns; a time is the median over rounds
of the slowest rank's step, a ratio the median over rounds of that step over stock none's of the same round. A copy is exposed as
far as compute waits for it. Bytes are the most that the first stage holds at the end of a forward, in a step of its own.
Expected: those of a plan that keeps everything (0 %), less what the simulated step holds less than that plan's. On these ranks
device and host are the same memory, so a copy costs what the core takes for it, and bandwidths say nothing about a GPU's.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
from bisect import bisect_right
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from benchmarks.offloaded_bytes import Counted, count
from megatron_lynx.config import load_job
from megatron_lynx.config.job import Job
from megatron_lynx.measure.machine import this_machine
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.testbed.candidates import NONE, Candidate
from megatron_lynx.testbed.place import Place, place_for
from megatron_lynx.testbed.profiling import measure_profile
from megatron_lynx.testbed.race import Lap, race
from megatron_lynx.units import MIB

RATIOS = (0.0, 0.3, 0.5, 0.63, 1.0)
LAYOUT = {
    "gpus": 2,
    "parallel.tensor": 1,
    "parallel.pipeline": 2,
    "parallel.layers_per_chunk": 1,
    "batch.global": 8,
    "policy": "none",
}
"""Of `jobs/demo`, for want of more cores."""


@dataclass(frozen=True)
class Row:
    """One share."""

    setting: str
    step_s: float
    ratio_to_none: float
    exposed_copy_s: float
    """Of one step, on the rank that waits most."""
    host_bytes: int
    """Of the rank that needs most."""
    held_bytes: int
    expected_bytes: int

    @property
    def bytes_error(self) -> float:
        return self.expected_bytes / self.held_bytes - 1


def rows(job: Job, profile: Profile, place: Place, rounds: int) -> list[Row]:
    plans = {f"{ratio:.0%}": make_plan(job.model_copy(update={"offload_ratio": ratio}), profile) for ratio in RATIOS}
    candidates = [NONE, *(Candidate(name, plan=plan) for name, plan in plans.items())]
    counted: list[dict[str, Counted]] = place.run(count, job, candidates)
    laps: list[dict[str, Lap]] = place.run(race, job, candidates, rounds, 1)
    simulated = {name: most_after_forwards(rehearse(plan, profile)) for name, plan in plans.items()}
    names, kept = [each.name for each in candidates], next(iter(plans))
    seconds = {name: [max(ranks) for ranks in zip(*(lap[name].step_s for lap in laps), strict=True)] for name in names}
    return [
        Row(
            setting=name,
            step_s=statistics.median(seconds[name]),
            ratio_to_none=statistics.median(map(operator.truediv, seconds[name], seconds[NONE.name])),
            exposed_copy_s=max(rank[name].exposed_copy_s for rank in counted),
            host_bytes=max(rank[name].host_bytes for rank in counted),
            held_bytes=counted[0][name].held_bytes,
            expected_bytes=counted[0][kept].held_bytes - simulated[kept] + simulated.get(name, simulated[kept]),
        )
        for name in names
    ]


def most_after_forwards(simulation: Simulation) -> int:
    """The most that the first stage's layers hold when one of its forwards ends."""
    curve, most = simulation.memory(0), 0
    for each in simulation.executed[0]:
        if each.action.kind == "F":
            most = max(most, curve.bytes[bisect_right(curve.times_s, each.end_s) - 1])
    return most


def markdown(found: list[Row], words: str) -> str:
    lines = ["# Activations in host memory", "", f"{date.today()}; {words}.", "", *(__doc__ or "").splitlines()[4:], ""]
    lines += ["| offloaded | step s | to none | copies exposed s | host MiB | device MiB | expected | error |"]
    lines.append("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for each in found:
        sizes = f"{each.host_bytes / MIB:.1f} | {each.held_bytes / MIB:.1f} | {each.expected_bytes / MIB:.1f}"
        times = f"{each.step_s:.3f} | {each.ratio_to_none:.3f} | {each.exposed_copy_s:.4f}"
        lines.append(f"| {each.setting} | {times} | {sizes} | {each.bytes_error:+.1%} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    job = load_job("jobs/demo", LAYOUT)
    with place_for(job) as place:
        profile = measure_profile(job, place, lambda what: nullcontext())
        found = rows(job, profile, place, chosen.rounds)
        machine = this_machine(place.links, "cpu")
    text = markdown(found, f"{machine}; {place.ranks} ranks; {chosen.rounds} rounds")
    stem = chosen.output / f"{date.today()}-offload"
    stem.with_suffix(".md").write_text(text)
    shown = [{**asdict(each), "bytes_error": each.bytes_error} for each in found]
    answer = {"machine": machine.model_dump(), "rounds": chosen.rounds, "rows": shown, "profile": profile.model_dump(mode="json")}
    stem.with_suffix(".json").write_text(json.dumps(answer, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
