"""Where a plan gains much, little or nothing over stock recomputation: one layout, and one thing changed at a time.

    python -m benchmarks.when_not             the table of docs/when_not.md; a test holds it current
    python -m benchmarks.when_not --local     the same for Megatron's own layers
    python -m benchmarks.when_not --json      the rows with their seconds, for programs
    python -m benchmarks.when_not --small configs/hosts/NAME.yaml     small layers, on a host of which that file tells

Nothing runs: seconds are the simulator's, from the figures of catalogued clusters, without the optimizer's update. Each row is
given the memory of stock full recomputation and a tenth of what that saves:

    full ├───┼───────────────────────────────┤ none        what a device holds
             └ the budget of the row: stock recomputes 9 layers of 10 (block), ours keeps, hides and replays as it likes

Userbuffers (--tp-comm-overlap) hide collectives behind the GEMMs they belong to, and leave no windows. What they can gain at most
is priced by links between a node's GPUs that take no time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lynx.anatomy import DENSE, PASSES
from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.job import Budget, Job, Policy
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.stage import phases_of
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.planner import Decision, decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.search.simulated import pipeline_s
from megatron_lynx.solver.options import StageProblems
from megatron_lynx.units import GIB
from megatron_lynx.yaml_file import read_yaml

KEPT_BY_STOCK = 0.1
"""The part of what full recomputation saves that the budget of a row gives back."""

REFERENCE: dict[str, Any] = {
    "model": "llama3-8b",
    "implementation": "transformer_engine",
    "cluster": "a100-80g",
    "tensor": 4,
    "pipeline": 2,
    "microbatches": 16,
    "micro": 1,
    "seq": 8192,
    "host_time": None,
}
"""The layout that rows are variations of."""

CASES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("t=4, p=2, m=16, A100 (NVLink 300 GB/s)", {}),
    ("t=1, p=1: no collective, no message", {"tensor": 1, "pipeline": 1}),
    ("t=1, p=2: messages between stages alone", {"tensor": 1, "pipeline": 2}),
    ("t=2, p=1", {"tensor": 2, "pipeline": 1}),
    ("t=4, p=1", {"tensor": 4, "pipeline": 1}),
    ("t=8, p=1", {"tensor": 8, "pipeline": 1}),
    ("t=4, p=4", {"pipeline": 4}),
    ("m=2: a third of the step is bubble", {"microbatches": 2}),
    ("m=64", {"microbatches": 64}),
    ("sequence 2048", {"seq": 2048}),
    ("sequence 32768", {"seq": 32768}),
    ("H800 (NVLink 200 GB/s)", {"cluster": "h800-80g"}),
    ("H100 (NVLink 450 GB/s)", {"cluster": "h100-80g"}),
    ("A100 on PCIe", {"cluster": "a100-80g-pcie"}),
    ("H800, t=8, p=1", {"tensor": 8, "pipeline": 1, "cluster": "h800-80g"}),
    ("Llama 3 70B, t=8, p=4", {"model": "llama3-70b", "tensor": 8, "pipeline": 4}),
    ("Llama 3 70B, t=8, p=4, H800", {"model": "llama3-70b", "tensor": 8, "pipeline": 4, "cluster": "h800-80g"}),
)
"""What is changed, in words and for the job."""

SMALL: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("H800, t=8, p=1, sequence 8192", {"tensor": 8, "pipeline": 1, "cluster": "h800-80g"}),
    ("H800, t=8, p=1, sequence 2048", {"tensor": 8, "pipeline": 1, "cluster": "h800-80g", "seq": 2048}),
    ("A100, t=8, p=1, sequence 2048", {"tensor": 8, "pipeline": 1, "seq": 2048}),
)
"""Layers so small that Python may not keep the GPU busy: with host time, each beside the same row without."""


SECONDS = ("none_s", "block_s", "ours_s", "replay_s", "hidden_s", "hideable_s", "forward_windows_s", "filled_s")
"""What `--json` says of a row, as it is."""


@dataclass(frozen=True)
class Row:
    """Seconds of one step of each setting, and what the plan does."""

    what: str
    none_s: float
    block_s: float
    """Stock within the budget: full recomputation of so many layers as have to be."""
    hidden_none_s: float
    """Stock none if every collective were hidden."""
    hidden_block_s: float
    ours_s: float
    hidden: float
    """The share of replayed seconds that windows hide, in [0, 1]; 1 where nothing is replayed."""
    none_gib: float
    budget_gib: float
    replay_s: float
    """What all stages replay."""
    hidden_s: float
    hideable_s: float
    """The least of what a stage replays and of what the waits of its backwards and receives have room for, for all stages
    together. Where forwards hide more, that counts as well."""
    forward_windows_s: float
    """What forwards have room for besides. What they hide is held until its backward, so that it takes bytes of the budget."""
    filled_s: float
    """Deferred weight gradients that run in waits, of all stages."""

    @property
    def as_json(self) -> dict[str, Any]:
        """`best_stock_s`: full recomputation of blocks is all that is priced of what stock offers within the budget."""
        seconds = {name: getattr(self, name) for name in SECONDS}
        return {"what": self.what, **seconds, "best_stock_s": self.block_s}


def job_of(change: Mapping[str, Any]) -> Job:
    """The reference layout with something changed; one replica."""
    asked = {**REFERENCE, **change}
    tensor, pipeline = asked["tensor"], asked["pipeline"]
    model = read_yaml(bundled_configs() / f"models/{asked['model']}.yaml") | {
        "seq": asked["seq"],
        "implementation": "transformer_engine",
    }
    return Job.model_validate(
        {
            "model": model | {"seq": asked["seq"], "implementation": asked["implementation"]},
            "cluster": _cluster(asked["cluster"], asked["host_time"]),
            "gpus": tensor * pipeline,
            "parallel": {"tensor": tensor, "pipeline": pipeline, "sequence_parallel": tensor > 1, "distributed_optimizer": True},
            "batch": {"micro": asked["micro"], "global": asked["micro"] * asked["microbatches"]},
        }
    )


def _cluster(name: str, host_time: str | None) -> dict[str, Any]:
    """A catalogued cluster, with this host time alone: without, rows say what a device does that never waits for Python."""
    described = cluster_data(bundled_configs() / f"clusters/{name}.yaml")
    return {**described, "host_time": None if host_time is None else read_yaml(host_time)}


def rows(always: Mapping[str, Any]) -> Iterator[Row]:
    """`always`: what is changed in every row."""
    for what, change in CASES:
        yield row(what, job_of({**always, **change}))


def row(what: str, job: Job) -> Row:
    none_s, block_s = stock_s(job)
    most, least = (max(each.total for each in memory_of_stages(under(job, policy))) / GIB for policy in ("none", "full"))
    budget_gib = least + KEPT_BY_STOCK * (most - least)
    allowed = job.model_copy(update={"budget": Budget(memory_gib=budget_gib)})
    decision = decide(allowed, analytic_profile(job))
    ours_s = decision.simulation.step_s
    replays = [replayed_s(decision, stage) for stage in range(job.parallel.pipeline)]
    hidden_s, exposed_s = (sum(seconds) for seconds in zip(*replays, strict=True))
    windows = [windows_s(decision, stage) for stage in range(job.parallel.pipeline)]
    hideable_s = sum(min(sum(both), max(late_s, both[0])) for both, (late_s, _) in zip(replays, windows, strict=True))
    share = hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else 1.0
    ends = (most, budget_gib, hidden_s + exposed_s, hidden_s, hideable_s, sum(early_s for _, early_s in windows))
    filled_s = sum(decision.simulation.filled_s(stage) for stage in range(job.parallel.pipeline))
    return Row(what, none_s, block_s, *stock_s(at_once(job)), ours_s, share, *ends, filled_s)


def stock_s(job: Job) -> tuple[float, float]:
    """Nothing recomputed; and as many layers as the budget of the row asks for."""
    profile = analytic_profile(job)
    none_s, full_s = (pipeline_s(under(job, policy), profile, 0.0) for policy in ("none", "full"))
    return none_s, none_s + (1 - KEPT_BY_STOCK) * (full_s - none_s)


def under(job: Job, policy: Policy) -> Job:
    return job.model_copy(update={"policy": policy})


def at_once(job: Job) -> Job:
    """The job with links between a node's GPUs that take no time: tensor-parallel collectives use `nvlink`."""
    cluster = job.cluster.model_dump()
    cluster["nvlink"] = {"gb_per_s": 1e9, "efficiency": 1.0, "latency_us": 1e-6}
    return job.model_copy(update={"cluster": Cluster.model_validate(cluster)})


def replayed_s(decision: Decision, stage: int) -> tuple[float, float]:
    """Seconds of a stage's replays in one step: hidden, exposed."""
    predicted = decision.plan.stages[stage].predicted
    return predicted.hidden_replay_s, predicted.exposed_replay_s


def windows_s(decision: Decision, stage: int) -> tuple[float, float]:
    """Seconds of replay for which there is room in a stage's waits, as stock leaves them: in collectives of backwards and
    receives of gradients; and in collectives of forwards that come before another micro-batch's backward."""
    job, profile = decision.job, analytic_profile(decision.job)
    problems = StageProblems(job, profile)
    seats, phases = problems.seats(stage), phases_of(job, stage)
    layer_s = {
        passing: sum(sum(window_lengths_s(profile, passing, each, LayerShape.of(job).gathered_bytes)) for each in DENSE.values())
        for passing in PASSES
    }
    last = stage == job.parallel.pipeline - 1
    received_s = 0.0 if last else phases.steady * profile.link_s("p2p", profile.attention.input_bytes)
    received_s += phases.cooldown * (seats.received_s or 0.0)
    forward_s = 0.0 if last else phases.steady * layer_s["fwd"]
    backward_s = job.microbatches * job.layers_on(stage) * layer_s["bwd"]
    return (backward_s + received_s) / profile.interference, job.layers_on(stage) * forward_s / profile.interference


def table(rows: Iterable[Row]) -> str:
    """Markdown. Steps are ratios to stock none."""
    lines = ["| layout | none holds | budget | stock (block) | ours | hidden | filled | gain | userbuffers: none, block |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for each in rows:
        block, ours, bare, hidden_block = (
            f"{seconds / each.none_s:.2f}" for seconds in (each.block_s, each.ours_s, each.hidden_none_s, each.hidden_block_s)
        )
        gain = f"{each.block_s / each.ours_s - 1:.0%}"
        hidden, filled = f"{each.hidden:.0%}", f"{each.filled_s / each.none_s:.2f}"
        sizes = [f"{size:.0f} GiB" for size in (each.none_gib, each.budget_gib)]
        lines.append(f"| {' | '.join([each.what, *sizes, block, ours, hidden, filled, gain, f'{bare}, {hidden_block}'])} |")
    return "\n".join(lines)


def small(host_time: str) -> Iterator[Row]:
    """Small layers, on a host that is never late and on one of which a file tells."""
    for what, change in SMALL:
        yield row(what, job_of(change))
        yield row(f"{what}, with host time", job_of({**change, "host_time": host_time}))


if __name__ == "__main__":
    if "--small" in sys.argv:
        priced = small(sys.argv[sys.argv.index("--small") + 1])
    else:
        priced = rows({"implementation": "local"} if "--local" in sys.argv else {})
    print(json.dumps([each.as_json for each in priced], indent=1) if "--json" in sys.argv else table(priced))
