"""Training without flushes, computing in earnest: what it gains, and whether that is what the simulator predicts.

    python -m benchmarks.double_buffered -o benchmarks/results          (--quick: a tiny model, two rounds; a try, no measurement)

Two stages on a core each, as many micro-batches as stages (m = p), Megatron's optimizer with clipping: every update is a barrier.
Both schedules train in the same processes, in turns, each from an empty pipeline to an empty one; a batch's seconds are the mean
of those between the second update and the last but one, on the first stage, a figure the median over rounds. Predicted: the
profile of the job (one layer, the ends of the model, messages), measured before, simulated in the same order; on top the seconds
of an update alone, measured behind a drain in both ways. Gain: the part of a flushing batch that is saved.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from benchmarks.results_folder import results_folder
from benchmarks.schedules import Timed, Way, time_ways
from megatron_lynx.config import load_job
from megatron_lynx.config.job import Job
from megatron_lynx.measure.measurement import this_machine
from megatron_lynx.planner import uniform_plan
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.testbed.profiling import measure_profile
from megatron_lynx.testbed.ranks import hosts_for

FLUSH, DEFERRED, AT_ONCE = "flush", "without flushes, updates deferred", "without flushes, updates at once"
SETTINGS: dict[str, bool | None] = {FLUSH: None, DEFERRED: True, AT_ONCE: False}
"""Whether `DoubleBuffered` defers updates; None: Megatron's own schedule."""
LAYOUT: dict[str, Any] = {
    "gpus": 2,
    "parallel.tensor": 1,
    "parallel.pipeline": 2,
    "batch.global": 2,
    "overlap.weight_gradients": "auto",
}
"""Changes of `jobs/demo`, as there are only two cores."""
QUICK = {"model.layers": 2, "model.seq": 128, "model.hidden": 256, "model.ffn": 512}


@dataclass(frozen=True)
class Row:
    """One setting. Seconds of one batch in the middle of a run, its update included."""

    setting: str
    measured_s: float
    lowest_s: float
    highest_s: float
    predicted_s: float
    update_s: float
    measured_gain: float
    """The part of the seconds with flushes that is saved: the median over rounds."""
    predicted_gain: float

    @property
    def share(self) -> float:
        """The measured gain as a part of the predicted one."""
        return self.measured_gain / self.predicted_gain if self.predicted_gain else 1.0


def predicted_s(job: Job, profile: Profile, defers: bool | None) -> float:
    """A batch without its update."""
    stated = {} if defers is None else {"schedule": "double_buffered", "defer_updates": defers}
    return rehearse(uniform_plan(job.model_copy(update=stated), "none"), profile).step_s


def rows(job: Job, profile: Profile, ranks: list[dict[str, Timed]]) -> list[Row]:
    measured = {name: ranks[0][name].batch_s for name in SETTINGS}
    update_s = {name: max(rank[name].update_s for rank in ranks) for name in SETTINGS}
    predicted = {name: predicted_s(job, profile, defers) + update_s[name] for name, defers in SETTINGS.items()}
    return [
        Row(
            setting=name,
            measured_s=statistics.median(measured[name]),
            lowest_s=min(measured[name]),
            highest_s=max(measured[name]),
            predicted_s=predicted[name],
            update_s=update_s[name],
            measured_gain=statistics.median(1 - own / flush for own, flush in zip(measured[name], measured[FLUSH], strict=True)),
            predicted_gain=1 - predicted[name] / predicted[FLUSH],
        )
        for name in SETTINGS
    ]


def markdown(found: list[Row], words: str) -> str:
    lines = [
        "# Without flushes, computing in earnest",
        "",
        f"{date.today()}; {words}.",
        "",
        *(__doc__ or "").splitlines()[4:],
        "",
    ]
    lines += ["| setting | batch s (lowest, highest) | predicted s | update s | gain | predicted gain | share of it |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for each in found:
        measured = f"{each.measured_s:.3f} ({each.lowest_s:.3f}, {each.highest_s:.3f})"
        share = "-" if each.setting == FLUSH else f"{each.share:.0%}"
        gains = f"{each.measured_gain:.1%} | {each.predicted_gain:.1%}"
        lines.append(f"| {each.setting} | {measured} | {each.predicted_s:.3f} | {each.update_s:.3f} | {gains} | {share} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=results_folder, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batches", type=int, default=7, help="of each run, of which all but the first two and the last count")
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of the link between the stages")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two rounds: does it run?")
    chosen = parser.parse_args()
    job = load_job("jobs/demo", {**LAYOUT, "cluster.link_mbit_per_s": chosen.mbit, **(QUICK if chosen.quick else {})})
    rounds = 2 if chosen.quick else chosen.rounds
    hosts = hosts_for(job)
    profile = measure_profile(job, hosts, lambda what: nullcontext())
    ranks = hosts.run(time_ways, job, [Way(*setting) for setting in SETTINGS.items()], rounds, chosen.batches)
    machine = this_machine(hosts.links, "cpu")
    found = rows(job, profile, ranks)
    model = f"{job.model.layers} layers of {job.model.hidden}, {job.model.seq} tokens, {job.microbatches} micro-batches"
    text = markdown(found, f"{machine}; 2 stages, {model}; {rounds} rounds of {chosen.batches} batches")
    if chosen.output is not None:
        stem = chosen.output / f"{date.today()}-double-buffered"
        stem.with_suffix(".md").write_text(text)
        answer = {"machine": machine.model_dump(), "rows": [{**asdict(row), "share": row.share} for row in found]}
        stem.with_suffix(".json").write_text(json.dumps(answer, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
