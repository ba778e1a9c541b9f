"""What does recomputing everything cost where waits hold recomputations and weight gradients? Two ranks, 16 layers, against
stock.

    python -m benchmarks.both_fillers -o benchmarks/results [--rates 1000 400] [--modes no yes] [--rounds 5]     idle, 25 minutes

Two ranks, one core each, on two emulated hosts, tensor-parallel; three micro-batches. For each rate of the link, without and
with sequence parallelism: stock without and with full recomputation; the planner's plan of least memory, which recomputes
everything, with nothing in its waits, with recomputations in them, with weight gradients as well; and a plan that keeps
everything and defers these. All settings add their weight gradients up in place. They take turns in the same processes; a ratio
is the median over rounds of the slowest rank's step over stock none's of the same round. `simulated`: the same ratio from a
profile that was measured right before, over the same link.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date

from benchmarks.overlap_sweep import job_of
from benchmarks.results_folder import results_folder
from megatron_lynx.config.job import Batch, Budget, Job
from megatron_lynx.config.parallel import Overlap
from megatron_lynx.cost.section import Prices
from megatron_lynx.measure.measurement import this_machine
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import make_plan, uniform_plan
from megatron_lynx.planner.filling import Filler
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.testbed.candidates import FULL, NONE, Candidate, ours
from megatron_lynx.testbed.comparison import Lap, race
from megatron_lynx.testbed.profiling import measure_profile
from megatron_lynx.testbed.ranks import Hosts, hosts_for
from megatron_lynx.units import GIB
from megatron_lynx.whole_file import write_whole

LAYERS, MICROBATCHES = 16, 3
RATES = (1000.0, 400.0)
"""Mbit/s."""


@dataclass(frozen=True)
class Row:
    """One setting over one link."""

    sequence_parallel: bool
    link_mbit_per_s: float
    setting: str
    step_s: float
    """The median."""
    of_none: float
    simulated_of_none: float | None
    """None for stock's full recomputation."""


def training(sequence_parallel: bool, rate: float) -> Job:
    job = job_of(LAYERS, sequence_parallel, rate)
    batch = Batch.model_validate({"micro": 1, "global": MICROBATCHES})
    return job.model_copy(update={"batch": batch, "overlap": Overlap(weight_gradients="deferred")})


def filled(plan: Plan, job: Job, profile: Profile) -> Plan:
    """The plan with weight gradients in its waits, as many as help: memory is no matter here."""
    filler = Filler(plan, job, Prices(profile), rehearse(plan, profile))
    return filler.filled([int(job.cluster.memory_gib * GIB)], forwards=True, pieces=False)


def settings(job: Job, profile: Profile) -> Sequence[Candidate]:
    alone = job.model_copy(update={"budget": Budget(), "overlap": Overlap(weight_gradients="none")})
    recomputations = filled(make_plan(alone, profile), job, profile)
    keeps = filled(uniform_plan(job, "none"), job, profile)
    return NONE, FULL, *ours(recomputations), Candidate("keeps everything, weight gradients deferred", plan=keeps)


def rows(job: Job, hosts: Hosts, rounds: int) -> Iterator[Row]:
    profile = measure_profile(job, hosts, lambda what: nullcontext())
    candidates = settings(job, profile)
    laps: list[dict[str, Lap]] = hosts.run(race, job, list(candidates), rounds, 1)
    steps = {
        each.name: [max(ranks) for ranks in zip(*(lap[each.name].step_s for lap in laps), strict=True)] for each in candidates
    }
    none_s = rehearse(uniform_plan(job, "none"), profile).step_s
    for each in candidates:
        simulated = 1.0 if each is NONE else None if each.plan is None else rehearse(each.plan, profile).step_s / none_s
        yield Row(
            job.parallel.sequence_parallel,
            job.cluster.link_mbit_per_s or 0.0,
            each.name,
            statistics.median(steps[each.name]),
            statistics.median(map(operator.truediv, steps[each.name], steps[NONE.name])),
            simulated,
        )


def measure(modes: Sequence[str], rates: Sequence[float], rounds: int) -> Iterator[Row]:
    for mode in modes:
        for rate in rates:
            job = training(mode == "yes", rate)
            hosts = hosts_for(job)
            yield from rows(job, hosts, rounds)


def markdown(found: Sequence[Row], rounds: int) -> str:
    lines = ["# Both fillers", "", f"{date.today()}; {rounds} rounds.", "", *(__doc__ or "").splitlines()[4:], ""]
    lines += ["| sequence parallel | link Mbit/s | setting | step s | of none | simulated |", "|---|--:|---|--:|--:|--:|"]
    for row in found:
        simulated = "" if row.simulated_of_none is None else f"{row.simulated_of_none:.3f}"
        where = f"{'yes' if row.sequence_parallel else 'no'} | {row.link_mbit_per_s:.0f}"
        lines.append(f"| {where} | {row.setting} | {row.step_s:.3f} | {row.of_none:.3f} | {simulated} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=results_folder, required=True, help="folder")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), metavar="MBIT")
    parser.add_argument("--modes", nargs="+", choices=("no", "yes"), default=["no", "yes"], help="sequence parallelism")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    stem = chosen.output / f"{date.today()}-both-fillers"
    hosts = hosts_for(training(False, chosen.rates[0]))
    machine = this_machine(hosts.links, "cpu").model_dump(mode="json")
    found: list[Row] = []
    for row in measure(chosen.modes, chosen.rates, chosen.rounds):
        found.append(row)
        print(row, flush=True)
        answer = {"machine": machine, "rounds": chosen.rounds, "rows": [asdict(row) for row in found]}
        write_whole(stem.with_suffix(".json"), json.dumps(answer, indent=1) + "\n")
        write_whole(stem.with_suffix(".md"), markdown(found, chosen.rounds))


if __name__ == "__main__":
    main()
