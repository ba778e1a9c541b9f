"""How much of the recomputation do windows hide? Ratio of window to recomputation x depth x sequence parallelism, against stock.

    python -m benchmarks.overlap_sweep -o benchmarks/results

Two ranks, one core each, on two emulated hosts; the link's rate sets the ratio. Every setting of one row runs in the same
processes, in turns; a time is the median over rounds of the slowest rank's step. `hidden` is 1 - exposed / recomputation, where
exposed is step(ours) - step(none) and recomputation the seconds of recomputations in the same plan's trace, slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.resident_bytes import count
from benchmarks.results_folder import results_folder
from megatron_lynx.anatomy import COLUMN_PARALLEL, DENSE, RECOMPUTABLE
from megatron_lynx.config.job import Job
from megatron_lynx.measure.measurement import this_machine
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.testbed.candidates import FULL, NONE, Candidate, ours
from megatron_lynx.testbed.comparison import Lap, race
from megatron_lynx.testbed.profiling import measure_profile
from megatron_lynx.testbed.ranks import Hosts, hosts_for
from tests.uniform import uniform_plan

MODES = {"no sequence parallelism": (False, "keep"), "keep": (True, "keep"), "gather once": (True, "once")}
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
DEPTHS = (4, 16)


@dataclass(frozen=True)
class Row:
    """One line of the result. Seconds and shares; ratios are to stock none and to stock full of the same run."""

    mode: str
    layers: int
    aimed_ratio: float
    link_mbit_per_s: float
    measured_ratio: float
    none_s: float
    full_s: float
    on_demand_s: float
    ours_s: float
    recompute_s: float
    hidden_recomputations: int
    on_demand_recomputations: int

    @property
    def to_none(self) -> float:
        return self.ours_s / self.none_s

    @property
    def to_full(self) -> float:
        return self.ours_s / self.full_s

    @property
    def hidden(self) -> float:
        return 1 - max(0.0, self.ours_s - self.none_s) / self.recompute_s


def job_of(layers: int, sequence_parallel: bool, link_mbit_per_s: float | None) -> Job:
    """Llama-like: the GEMMs and the attention that recomputations repeat are 74 % of the FLOPs that stock full repeats."""
    model = {"layers": layers, "hidden": 512, "ffn": 1408, "heads": 8, "kv_groups": 8, "vocab": 1024, "seq": 512}
    kind = {"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False, "attention": "unfused", "dtype": "fp32"}
    return Job.model_validate(
        {
            "model": {**model, **kind},
            "cluster": {"name": "two hosts", "device": "cpu", "memory_gib": 8, "link_mbit_per_s": link_mbit_per_s},
            "gpus": 2,
            "parallel": {"tensor": 2, "sequence_parallel": sequence_parallel},
            "batch": {"micro": 1, "global": 1},
        }
    )


def plan_of(job: Job, gather: Any) -> Plan:
    """Everything that saves something is recomputed, one frame ahead (no dropout here, so the bda items save nothing)."""
    residuals = {section.residual for section in DENSE.values()}
    items = [item for item in RECOMPUTABLE if item not in residuals]
    if job.parallel.sequence_parallel and gather == "keep":
        items = [item for item in items if item not in COLUMN_PARALLEL]
    return uniform_plan(job, items, gather=gather)


def rate_for(ratio: float, job: Job, plan: Plan, profile: Profile) -> float:
    """Mbit/s at which the mean backward window is `ratio` times the mean recomputation."""
    element = job.model.element_bytes
    gathered = job.model.seq * job.batch.micro * job.model.hidden * element
    recomputed = set(plan.stages[0].rules[0].recompute)
    halves = [profile.attention, profile.mlp]
    recompute = statistics.mean(sum(half.items[item].forward_s for item in half.items if item in recomputed) for half in halves)
    if job.parallel.sequence_parallel:  # two ranks exchange halves; the plan uses windows that stock leaves exposed
        return gathered / 2 * 8 / (ratio * recompute) / 1e6
    behind = statistics.mean(half.items[linear].wgrad_s for half, linear in zip(halves, COLUMN_PARALLEL, strict=True))
    return gathered * 8 / (ratio * recompute + behind) / 1e6


def measured_ratio(laps: dict[str, Lap]) -> float:
    """Mean backward wait of the windows that the plan uses, with nothing in them, over the mean recomputation."""
    ahead = [event for event in laps["ours"].events if event.kind == "recompute"]
    used = {event.window for event in ahead}
    waits = [event for event in laps["ours, on demand"].events if event.kind == "window" and event.window in used]
    mean_s = [statistics.mean(event.seconds for event in events) for events in (waits, ahead)]
    return mean_s[0] / mean_s[1]


def row(mode: str, job: Job, aimed: float, plan: Plan, hosts: Hosts, rounds: int) -> Row:
    candidates = [NONE, FULL, *ours(plan)]
    results: list[dict[str, Lap]] = hosts.run(race, job, candidates, rounds, 1)
    step = {
        candidate.name: statistics.median(map(max, zip(*(laps[candidate.name].step_s for laps in results), strict=True)))
        for candidate in candidates
    }
    recomputations = [[event for event in laps["ours"].events if event.kind == "recompute"] for laps in results]
    return Row(
        mode=mode,
        layers=job.model.layers,
        aimed_ratio=aimed,
        link_mbit_per_s=job.cluster.link_mbit_per_s or 0.0,
        measured_ratio=min(map(measured_ratio, results)),
        none_s=step[NONE.name],
        full_s=step[FULL.name],
        on_demand_s=step["ours, on demand"],
        ours_s=step["ours"],
        recompute_s=max(sum(event.seconds for event in events) for events in recomputations),
        hidden_recomputations=sum(event.window != "on_demand" for event in recomputations[0]),
        on_demand_recomputations=sum(event.window == "on_demand" for event in recomputations[0]),
    )


def sweep(modes: list[str], ratios: list[float], depths: list[int], rounds: int) -> Iterator[Row]:
    for mode in modes:
        sequence_parallel, gather = MODES[mode]
        loose = job_of(1, sequence_parallel, None)
        hosts = hosts_for(loose)
        profile = measure_profile(loose, hosts, lambda what: nullcontext())
        for layers in depths:
            for ratio in ratios:
                rate = rate_for(ratio, loose, plan_of(loose, gather), profile)
                job = job_of(layers, sequence_parallel, round(rate, 1))
                hosts = hosts_for(job)
                yield row(mode, job, ratio, plan_of(job, gather), hosts, rounds)


def bytes_per_layer(mode: str) -> dict[str, float]:
    """Resident bytes of one more layer by setting: the slope between two depths."""
    sequence_parallel, gather = MODES[mode]
    held = {}
    for layers in (4, 8):
        job = job_of(layers, sequence_parallel, None)
        candidates: list[Candidate] = [NONE, FULL, ours(plan_of(job, gather))[-1]]
        hosts = hosts_for(job)
        held[layers] = hosts.run(count, job, candidates)[0]
    return {name: (held[8][name] - held[4][name]) / 4 for name in held[4]}


def markdown(rows: list[Row], held: dict[str, dict[str, float]], machine: str) -> str:
    lines = ["# Overlap sweep", "", f"{date.today()}; {machine}.", "", *(__doc__ or "").splitlines()[4:], ""]
    lines += [
        "| mode | layers | window : recompute | link Mbit/s | none s | full s | on demand s | ours s | ours/none | ours/full |"
    ]
    lines[-1] += " hidden | recomputations hidden + on demand |"
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for each in rows:
        times = " | ".join(f"{value:.3f}" for value in (each.none_s, each.full_s, each.on_demand_s, each.ours_s))
        shares = f"{each.to_none:.3f} | {each.to_full:.3f} | {each.hidden:.0%}"
        where = f"{each.mode} | {each.layers} | {each.measured_ratio:.2f} | {each.link_mbit_per_s:.0f}"
        lines.append(f"| {where} | {times} | {shares} | {each.hidden_recomputations} + {each.on_demand_recomputations} |")
    lines += ["", "Resident bytes of one layer between forward and backward (slope between 4 and 8 layers):", ""]
    lines += ["| mode | stock none | stock full | ours | ours / full |", "|---|--:|--:|--:|--:|"]
    for mode, resident in held.items():
        none, full, plan = (resident[name] for name in ("stock none", "stock full", "ours"))
        lines.append(f"| {mode} | {none:,.0f} | {full:,.0f} | {plan:,.0f} | {plan / full:.2f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=results_folder, required=True, help="folder")
    parser.add_argument("--name", default="overlap-sweep")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS), help="aimed at; the result says what came of it")
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS))
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    held = {mode: bytes_per_layer(mode) for mode in chosen.modes}
    rows = []
    for each in sweep(chosen.modes, chosen.ratios, chosen.depths, chosen.rounds):
        rows.append(each)
        print(
            f"{each.mode}, {each.layers} layers, window/recompute {each.measured_ratio:.2f}: {each.to_none:.3f} of none",
            flush=True,
        )
    write(chosen.output / f"{date.today()}-{chosen.name}", rows, held, chosen.rounds)


def write(stem: Path, rows: list[Row], held: dict[str, dict[str, float]], rounds: int) -> None:
    hosts = hosts_for(job_of(1, False, 300.0))
    machine = this_machine(hosts.links, "cpu")
    links = "emulated hosts and shaped links" if machine.links.kind == "shaped" else machine.links.kind
    made_of = f"torch {machine.torch}, megatron-core {machine.megatron_core}"
    words = f"{machine.cpu}, {machine.cores} cores, {made_of}; {links}; {rounds} rounds"
    stem.with_suffix(".md").write_text(markdown(rows, held, words))
    shown = [{**asdict(each), "to_none": each.to_none, "to_full": each.to_full, "hidden": each.hidden} for each in rows]
    answer = {"machine": machine.model_dump(), "rounds": rounds, "rows": shown, "bytes_per_layer": held}
    stem.with_suffix(".json").write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
