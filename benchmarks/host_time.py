"""Host time of a plan: how long Python takes for one layer and one micro-batch where there is next to nothing to compute.

    python -m benchmarks.host_time [--json] [--layers 16] [--rounds 15]        one CPU, about two minutes

On a GPU the host has to stay ahead of the device, so what matters is the time in which a layer's kernels are issued. Here tensors
are tiny (width 32, 16 tokens), so that a step is nearly all Python: Megatron's, PyTorch's and ours. Every setting trains the same
weights; settings take turns, step by step; figures are medians. One rank, but for windows and gathers, which need two: those
ranks have a core each, and the seconds include gloo's exchange on loopback, which stock none has as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from megatron_lynx.anatomy import DENSE
from megatron_lynx.anatomy.dense import ACTIVATION
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Offload, Plan
from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.candidates import FULL, NONE, Candidate
from megatron_lynx.testbed.hosts import hosts_for
from megatron_lynx.testbed.race import race
from megatron_lynx.testbed.tiny_jobs import tiny_job

MICROBATCHES = 4
NORMS_AND_ACTIVATION = (*(section.norm for section in DENSE.values()), ACTIVATION)


@dataclass(frozen=True)
class Row:
    """One setting in one layout."""

    layout: str
    setting: str
    layer_ms: float
    """Host milliseconds of one layer and one micro-batch, forward and backward."""
    to_none: float
    to_full: float


def layouts(layers: int) -> Iterator[tuple[str, Job, list[Candidate]]]:
    """Each layout with the settings that need it."""
    one, two = tiny_job("llama", layers=layers, microbatches=MICROBATCHES), tiny_job("llama", layers=layers, tensor=2)
    gathered = tiny_job("llama", layers=layers, tensor=2, sequence_parallel=True)
    everything = uniform_plan(one, windows=False)
    yield (
        "one rank",
        one,
        [
            Candidate("keeps everything", plan=uniform_plan(one, "none")),
            Candidate("replays norms and activation", plan=uniform_plan(one, NORMS_AND_ACTIVATION, windows=False)),
            Candidate("replays everything on demand", plan=everything),
        ],
    )
    yield "TP2", two, [Candidate("replays everything in windows", plan=uniform_plan(two))]
    yield "TP2+SP", gathered, [Candidate("gathers once", plan=uniform_plan(gathered, gather="once"))]
    pipeline = tiny_job("llama", layers=layers, pipeline=2, microbatches=MICROBATCHES)
    yield "PP2", pipeline, [Candidate("offloads, keeps everything", plan=offloading(uniform_plan(pipeline, "none")))]


def offloading(plan: Plan) -> Plan:
    """The same plan; every micro-batch that waits for its backward sends all that can go to the host."""
    offload = Offload(bytes=2**30, smallest_tensor_bytes=0)
    stages = tuple(stage.model_copy(update={"offload": offload}) for stage in plan.stages)
    return Plan.model_validate(plan.model_copy(update={"stages": stages}).model_dump())


def rows(layers: int, rounds: int) -> Iterator[Row]:
    for layout, job, plans in layouts(layers):
        candidates = [NONE, FULL, *plans]
        with hosts_for(job) as hosts:
            laps = hosts.run(race, job, candidates, rounds, 2)
        per_layer = layers * job.microbatches / job.parallel.pipeline
        ms = {each.name: 1e3 * statistics.median(laps[0][each.name].step_s) / per_layer for each in candidates}
        for each in candidates:
            none, full = (ms[each.name] / ms[stock.name] for stock in (NONE, FULL))
            yield Row(layout, each.name, round(ms[each.name], 3), round(none, 3), round(full, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    found = list(rows(options.layers, options.rounds))
    if options.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
        return
    table = Table(title="milliseconds of one layer and one micro-batch, forward and backward")
    for column in ("layout", "setting", "ms", "of stock none", "of stock full"):
        table.add_column(column)
    for row in found:
        table.add_row(row.layout, row.setting, f"{row.layer_ms:.2f}", f"{row.to_none:.2f}", f"{row.to_full:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
