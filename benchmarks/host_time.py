"""Host time of a plan: what Python takes for one layer and one micro-batch, where there is next to nothing to compute.

    python -m benchmarks.host_time [--json] [--layers 16] [--rounds 9] [--te FOLDER] [--profile]       idle machine, minutes

On a GPU the host has to stay ahead of the device, so what matters is how long it takes to issue a layer's kernels. Here tensors
are tiny (width 32, 16 tokens), so that a step is nearly all Python: Megatron's, PyTorch's, gloo's and ours. Every setting
trains the same weights; settings take turns; figures are the least of all steps of the thread's own processor time, of the rank
that needs most (`testbed/host_time`): whatever else runs only adds to it, and medians differed by a third within minutes.
Embedding, head and loss are a part of every setting's step. What a plan recomputes takes time of its own (`own_ms`): on one rank
the items' forwards are measured as a profile measures them, and the last column leaves them out.
`--te`: the folder of a Transformer Engine whose layers run as well, by its own Python; its kernels are a stand-in's, in Python
too, which dampens the ratios.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.host_seconds import forwards_ms, host_seconds, profiled
from megatron_lynx.anatomy import DENSE
from megatron_lynx.config.job import Job
from megatron_lynx.kinds.dense.section import ACTIVATION
from megatron_lynx.measure.measurement import Links, this_machine
from megatron_lynx.testbed.candidates import FULL, NONE, Candidate, offloading_all
from megatron_lynx.testbed.ranks import Hosts, hosts_for
from megatron_lynx.timeline import Passes
from tests import instruments
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

MICROBATCHES = 4
STEPS = 3
"""Of each setting in each of its turns."""
NORMS_AND_ACTIVATION = (*(section.norm for section in DENSE.values()), ACTIVATION)


@dataclass(frozen=True)
class Row:
    """One setting in one layout: host milliseconds of one layer and one micro-batch."""

    layers: str
    layout: str
    setting: str
    forward_ms: float
    backward_ms: float
    of_none: float
    of_full: float
    own_ms: float = 0.0
    """Of what the setting recomputes, without anything of ours; 0 where that is not measured."""
    of_none_without_own: float | None = None


@dataclass(frozen=True)
class Layout:
    """A layout, and the settings that need it."""

    name: str
    job: Job
    plans: list[Candidate]


def layouts(layers: int, **model: Any) -> Iterator[Layout]:
    def job(**parallel: Any) -> Job:
        return tiny_job("llama", layers=layers, microbatches=MICROBATCHES, **parallel, **model)

    one, two, gathered, stages = job(), job(tensor=2), job(tensor=2, sequence_parallel=True), job(pipeline=2)
    yield Layout(
        "one rank",
        one,
        [
            Candidate("keeps everything", plan=uniform_plan(one, "none")),
            Candidate("recomputes norms and activation", plan=uniform_plan(one, NORMS_AND_ACTIVATION, windows=False)),
            Candidate("recomputes everything on demand", plan=uniform_plan(one, windows=False)),
        ],
    )
    yield Layout("TP2", two, [Candidate("recomputes everything in windows", plan=uniform_plan(two))])
    yield Layout("TP2+SP", gathered, [Candidate("gathers once", plan=uniform_plan(gathered, gather="once"))])
    kept = uniform_plan(stages, "none")
    yield Layout(
        "PP2", stages, [Candidate("keeps everything", plan=kept), Candidate("offloads everything", plan=offloading_all(kept))]
    )


def rows(kind: str, layout: Layout, hosts: Hosts, rounds: int) -> Iterator[Row]:
    candidates = [NONE, FULL, *layout.plans]
    ranks: list[dict[str, list[Passes]]] = hosts.run(host_seconds, layout.job, candidates, rounds, STEPS)
    per_layer = layout.job.model.layers * MICROBATCHES / layout.job.parallel.pipeline
    found = {each.name: _slowest([rank[each.name] for rank in ranks], per_layer) for each in candidates}
    item_ms = {} if hosts.ranks > 1 else hosts.run(forwards_ms, layout.job, rounds)[0]
    none_ms, full_ms = (sum(found[stock.name]) for stock in (NONE, FULL))
    for each in candidates:
        forward_ms, backward_ms = found[each.name]
        both_ms, own_ms = forward_ms + backward_ms, sum(item_ms.get(item, 0.0) for item in _recomputed(each))
        figures = (forward_ms, backward_ms, both_ms / none_ms, both_ms / full_ms, own_ms)
        without = round((both_ms - own_ms) / none_ms, 3) if own_ms else None
        yield Row(kind, layout.name, each.name, *(round(figure, 3) for figure in figures), without)  # type: ignore[call-arg]


def _recomputed(candidate: Candidate) -> tuple[str, ...]:
    """What every layer recomputes."""
    return () if candidate.plan is None else candidate.plan.stages[0].rules[0].recompute


def _slowest(ranks: list[list[Passes]], per_layer: float) -> tuple[float, float]:
    """Least milliseconds (forward, backward) of one layer and micro-batch, of the rank that needs most for both."""
    least = [(min(step.forward_s for step in steps), min(step.backward_s for step in steps)) for steps in ranks]
    forward_s, backward_s = max(least, key=sum)
    return 1e3 * forward_s / per_layer, 1e3 * backward_s / per_layer


def measure(layers: int, rounds: int, te: str | None, show_profile: bool) -> Iterator[Row]:
    kinds: dict[str, dict[str, Any]] = {"local": {}}
    if te is not None:
        instruments.offer()
        sys.path.insert(0, te)
        kinds["transformer_engine"] = {"implementation": "transformer_engine"}
    for kind, model in kinds.items():
        for layout in layouts(layers, **model):
            hosts = hosts_for(layout.job)
            yield from rows(kind, layout, hosts, rounds)
            for plan in layout.plans if show_profile else ():
                print(f"{kind}, {layout.name}: {plan.name}", file=sys.stderr)
                print(hosts.run(profiled, layout.job, plan, STEPS, 40)[0], file=sys.stderr)


def as_json(found: list[Row], layers: int, rounds: int) -> str:
    machine = this_machine(Links(kind="loopback")).model_dump(mode="json")
    facts = {"date": date.today().isoformat(), "machine": machine, "layers": layers, "rounds": rounds}
    return json.dumps({**facts, "rows": [asdict(row) for row in found]}, indent=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--te", metavar="FOLDER", help="a Transformer Engine, whose layers run as well")
    parser.add_argument("--profile", action="store_true", help="where the time of every plan goes, on stderr")
    options = parser.parse_args()
    found = list(measure(options.layers, options.rounds, options.te, options.profile))
    if options.json:
        print(as_json(found, options.layers, options.rounds))
        return
    table = Table(title="host milliseconds of one layer and one micro-batch")
    for column in (
        "layers",
        "layout",
        "setting",
        "forward",
        "backward",
        "of stock none",
        "of stock full",
        "own",
        "of none without own",
    ):
        table.add_column(column)
    for row in found:
        own = ("", "") if row.of_none_without_own is None else (f"{row.own_ms:.2f}", f"{row.of_none_without_own:.2f}")
        figures = (f"{row.forward_ms:.2f}", f"{row.backward_ms:.2f}", f"{row.of_none:.2f}", f"{row.of_full:.2f}", *own)
        table.add_row(row.layers, row.layout, row.setting, *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
