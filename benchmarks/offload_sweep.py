"""What keeping activations in host memory costs: a step against stock none, and what the device holds, share by share.

    python -m benchmarks.offload_sweep -o benchmarks/results          (--quick: tiny layers, one round; a try, no measurement)

Two ranks, each on a core of its own: two stages of four chunks, interleaved, so that the first stage has nine chunks in flight.
Plans are the planner's; nothing is recomputed. Messages between the stages take longer than passes, so that cores idle: windows
longer than the copies, of which the copying of everything would fill the stated part. All shares take turns in the same
processes, each behind a step that is not timed (a plan is put in force for its turn, and makes its host memory then). A step's
time is that of the slowest rank, a ratio is to stock none's mean step of the same round; medians and quartiles are over all of a
setting's steps. Stock none runs twice: what its second turn differs by is the noise. A copy is exposed as far as compute waits
for it. Bytes are the most that the first stage holds at the end of a forward, in a step of its own. Expected: those of a plan
that keeps everything (0 %), less what the simulated step holds less than that plan's. On these ranks device and host are the same
memory, so a copy costs what the core takes for it, and bandwidths say nothing about a GPU's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from benchmarks.offloaded_steps import Timed, held, timed
from benchmarks.results_folder import results_folder
from megatron_lynx.config import load_job
from megatron_lynx.config.job import Job
from megatron_lynx.measure.measurement import summarise, this_machine
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.testbed.candidates import NONE, Candidate
from megatron_lynx.testbed.profiling import measure_profile
from megatron_lynx.testbed.ranks import Hosts, hosts_for
from megatron_lynx.units import MIB

RATIOS = (0.0, 0.3, 0.5, 0.63, 1.0)
AGAIN = Candidate("stock none, again")
MOST_TO_NONE = 1.03
"""Where windows are long enough, at half of everything."""
LAYOUT: dict[str, Any] = {
    "model.seq": 256,
    "gpus": 2,
    "parallel.tensor": 1,
    "parallel.pipeline": 2,
    "parallel.layers_per_chunk": 1,
    "batch.global": 6,
    "policy": "none",
    "overlap.weight_gradients": "auto",
    "cluster": {"name": "two-hosts", "device": "cpu", "memory_gib": 8, "link_mbit_per_s": 100},
}
"""Changes of `jobs/demo`, as there are only two cores."""
QUICK = {"model.seq": 64, "model.hidden": 256, "model.ffn": 512}


@dataclass(frozen=True)
class Row:
    """One share."""

    setting: str
    step_s: float
    ratio_to_none: float
    lower_ratio: float
    upper_ratio: float
    """Quartiles."""
    exposed_copy_s: float
    """Seconds of one step on the rank that waits most: the median."""
    copied_bytes: int
    """Bytes of one step in both directions, of all ranks."""
    host_bytes: int
    """Host memory of the rank that needs most."""
    held_bytes: int
    expected_bytes: int

    @property
    def bytes_error(self) -> float:
        return self.expected_bytes / self.held_bytes - 1


def rows(plans: Mapping[str, Plan], profile: Profile, job: Job, hosts: Hosts, rounds: int, steps: int) -> Iterator[Row]:
    candidates = [NONE, AGAIN, *(Candidate(name, plan=plan) for name, plan in plans.items())]
    counted: list[dict[str, int]] = hosts.run(held, job, candidates)
    ranks: list[dict[str, list[list[Timed]]]] = hosts.run(timed, job, candidates, rounds, steps)
    simulated = {name: most_after_forwards(rehearse(plan, profile)) for name, plan in plans.items()}
    kept = next(iter(plans))
    none_s = [statistics.mean(turn) for turn in slowest(ranks, NONE.name)]
    for name in (each.name for each in candidates):
        turns = slowest(ranks, name)
        ratios = summarise([step_s / none for turn, none in zip(turns, none_s, strict=True) for step_s in turn])
        samples = [[step for turn in rank[name] for step in turn] for rank in ranks]
        yield Row(
            setting=name,
            step_s=statistics.median(step_s for turn in turns for step_s in turn),
            ratio_to_none=ratios.median_s,
            lower_ratio=ratios.lower_s,
            upper_ratio=ratios.upper_s,
            exposed_copy_s=max(statistics.median(step.exposed_copy_s for step in rank) for rank in samples),
            copied_bytes=sum(rank[-1].copied_bytes for rank in samples),
            host_bytes=max(rank[-1].host_bytes for rank in samples),
            held_bytes=counted[0][name],
            expected_bytes=counted[0][kept] - simulated[kept] + simulated.get(name, simulated[kept]),
        )


def slowest(ranks: Sequence[Mapping[str, list[list[Timed]]]], name: str) -> list[list[float]]:
    """Seconds of a setting's steps, by round."""
    rounds = zip(*(rank[name] for rank in ranks), strict=True)
    return [[max(step.step_s for step in together) for together in zip(*turns, strict=True)] for turns in rounds]


def most_after_forwards(simulation: Simulation) -> int:
    """The most that the first stage's layers hold when one of its forwards ends."""
    curve, most = simulation.memory(0), 0
    for each in simulation.executed[0]:
        if each.action.kind == "F":
            most = max(most, curve.bytes[bisect_right(curve.times_s, each.end_s) - 1])
    return most


def room(plans: Mapping[str, Plan], profile: Profile) -> str:
    """How long windows are, by the simulator, and how much of them copies would fill."""
    none, everything = (rehearse(plans[name], profile) for name in (f"{0.0:.0%}", f"{1.0:.0%}"))
    idle_s = min(none.bubble_s(stage) for stage in range(2))
    copied_s = max(sum(copy.bytes for copy in stage) for stage in everything.copied) / copied_per_s()
    idle, filled = f"{idle_s / none.step_s:.0%}", f"{copied_s / idle_s:.0%}"
    return f"stages idle for {idle} of a simulated step or more; all copies fill {filled} of that"


def copied_per_s() -> float:
    """At which a core copies memory that it has touched before."""
    import time

    import torch

    source = torch.ones(32 * MIB, dtype=torch.uint8)
    target = torch.ones_like(source)
    seconds = []
    for _ in range(9):
        begin_s = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begin_s)
    return source.nbytes / statistics.median(seconds)


def markdown(found: list[Row], words: str) -> str:
    lines = ["# Activations in host memory", "", f"{date.today()}; {words}.", "", *(__doc__ or "").splitlines()[4:], ""]
    lines += [
        "| offloaded | step s | to none | quartiles | copies exposed s | copied MiB | host MiB | device MiB | expected | error |"
    ]
    lines.append("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for each in found:
        copied = f"{each.copied_bytes / MIB:.1f} | {each.host_bytes / MIB:.1f}"
        held = f"{each.held_bytes / MIB:.1f} | {each.expected_bytes / MIB:.1f} | {each.bytes_error:+.1%}"
        times = f"{each.step_s:.3f} | {each.ratio_to_none:.3f} | {each.lower_ratio:.3f} to {each.upper_ratio:.3f}"
        lines.append(f"| {each.setting} | {times} | {each.exposed_copy_s:.4f} | {copied} | {held} |")
    return "\n".join([*lines, "", verdict(found), ""])


def verdict(found: list[Row]) -> str:
    half = next(row for row in found if row.setting == f"{0.5:.0%}")
    noise = next(row for row in found if row.setting == AGAIN.name)
    answer = "yes" if half.ratio_to_none <= MOST_TO_NONE else "no"
    ratios = f"{half.ratio_to_none:.3f} (none against itself: {noise.ratio_to_none:.3f})"
    return f"At 50 % at most {MOST_TO_NONE} of none: {answer}, {ratios}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=results_folder, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of every turn, behind one that is not timed")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    rounds, steps = (1, 1) if chosen.quick else (chosen.rounds, chosen.steps)
    job = load_job("jobs/demo", LAYOUT | (QUICK if chosen.quick else {}))
    hosts = hosts_for(job)
    print("measuring a layer and the link", file=sys.stderr, flush=True)
    profile = measure_profile(job, hosts, lambda what: nullcontext())
    plans = {f"{ratio:.0%}": make_plan(job.model_copy(update={"offload_ratio": ratio}), profile) for ratio in RATIOS}
    found = list(rows(plans, profile, job, hosts, rounds, steps))
    machine = this_machine(hosts.links, "cpu")
    text = markdown(found, f"{machine}; {hosts.ranks} ranks; {rounds} rounds of {steps} steps; {room(plans, profile)}")
    print(text)
    if chosen.output is None or chosen.quick:
        return
    stem = chosen.output / f"{date.today()}-offload"
    stem.with_suffix(".md").write_text(text)
    shown = [{**asdict(each), "bytes_error": each.bytes_error} for each in found]
    answer = {"machine": machine.model_dump(), "rounds": rounds, "steps": steps, "rows": shown}
    answer["profile"] = profile.model_dump(mode="json")
    stem.with_suffix(".json").write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
