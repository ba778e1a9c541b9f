"""Where a plan gains much, little or nothing over stock recomputation: one layout, and one thing changed at a time.

    python -m benchmarks.when_not             the table of docs/generated/when_not.md; a test holds it current
    python -m benchmarks.when_not --local     the same for Megatron's own layers
    python -m benchmarks.when_not --json      the rows with their seconds, for programs
    python -m benchmarks.when_not --small configs/hosts/NAME.yaml     small layers, on a host of which that file tells

Nothing runs: seconds are the simulator's, from the figures of catalogued clusters, without the optimizer's update. Each row is
given the memory of stock full recomputation and a tenth of what that saves:

    full ├───┼───────────────────────────────┤ none        what a device holds
└ the budget of the row: stock recomputes or offloads as its best setting does, ours keeps, hides, recomputes, offloads

Stock's best is sought among all that releases 0.16 to 0.19 offer (`megatron_lynx.stock`): sets of recomputed modules, blocks of
whole layers, fine-grained offloading of some layers or all. Ours is planned with `offload_ratio: auto`, and once more without
offloading. Copies slow nothing else down here.

Userbuffers (--tp-comm-overlap) hide collectives behind the GEMMs they belong to, and leave no windows. What they can gain at most
is priced by links between a node's GPUs that take no time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_lynx.anatomy import DENSE, PASSES
from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.job import Budget, Job, Policy
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.section import Prices
from megatron_lynx.cost.stage import cooldown_backwards, stage_seconds
from megatron_lynx.plan.timetables import planned_halves
from megatron_lynx.planner import Decision, decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import treated_halves
from megatron_lynx.stock import NONE, OF_POLICY
from megatron_lynx.stock.price import Priced, least_bytes, priced
from megatron_lynx.stock.rival import rivals
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


SECONDS = (
    "none_s",
    "block_s",
    "best_stock_s",
    "ours_s",
    "in_place_s",
    "recompute_s",
    "hidden_s",
    "hideable_s",
    "waits_s",
    "forward_windows_s",
    "filled_s",
)
"""What `--json` says of a row, as it is."""


@dataclass(frozen=True)
class Row:
    """Seconds of one step of each setting, and what the plan does."""

    what: str
    none_s: float
    block_s: float
    """Stock within the budget: full recomputation of so many layers as have to be."""
    best_stock_s: float
    best_stock: str
    """The fastest setting of stock within the budget, by name."""
    hidden_none_s: float
    """Stock none if every collective were hidden."""
    hidden_best_s: float
    """Stock's fastest within the budget, if every collective were hidden."""
    ours_s: float
    in_place_s: float
    """Ours if nothing goes to the host."""
    hidden: float
    """The share of recomputed seconds that windows hide, in [0, 1]; 1 where nothing is recomputed."""
    none_gib: float
    budget_gib: float
    recompute_s: float
    """What all stages recompute."""
    hidden_s: float
    hideable_s: float
    """The least of what a stage recomputes and of what the waits that the runtime may use for it have room for, for all stages
    together: collectives of its backwards, and receives for the recomputations that gather nothing (rule R2), less what weight
    gradients fill of either, without what nobody waits for, and with what they open. Where more is hidden, in forwards, that
    counts too."""
    waits_s: float
    """The same with all waits of backwards and receives as stock leaves them, whether a recomputation could run there or not."""
    forward_windows_s: float
    """What forwards have room for besides. What they hide is held until its backward, so that it takes bytes of the budget."""
    filled_s: float
    """Deferred weight gradients that run in waits, of all stages."""

    @property
    def as_json(self) -> dict[str, Any]:
        seconds = {name: getattr(self, name) for name in SECONDS}
        return {"what": self.what, **seconds, "best_stock": self.best_stock}


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


def held_gib(job: Job, policy: Policy) -> float:
    """What the fullest device holds."""
    return least_bytes(job, OF_POLICY[policy]) / GIB


def budget_gib_of(job: Job) -> float:
    """The memory of a row."""
    most, least = held_gib(job, "none"), held_gib(job, "full")
    return least + KEPT_BY_STOCK * (most - least)


def within(job: Job) -> Job:
    """The job with that budget."""
    return on_devices_of(job, budget_gib_of(job))


def on_devices_of(job: Job, budget_gib: float) -> Job:
    """The job on devices of which so much may be used."""
    return job.model_copy(update={"budget": Budget(memory_gib=budget_gib)})


def row(what: str, job: Job) -> Row:
    most, budget_gib = held_gib(job, "none"), budget_gib_of(job)
    allowed, profile = on_devices_of(job, budget_gib), analytic_profile(job)
    decision = decide(allowed.model_copy(update={"offload_ratio": "auto"}), profile)
    ours_s, in_place_s = (each.simulation.step_s for each in (decision, decide(allowed, profile)))
    recomputations = [recomputed_s(decision, stage) for stage in range(job.parallel.pipeline)]
    hidden_s, exposed_s = (sum(seconds) for seconds in zip(*recomputations, strict=True))
    waits = [waits_of(decision, stage) for stage in range(job.parallel.pipeline)]
    usable_s, all_s = (
        sum(
            min(sum(both) - each.never_s, max(room_s, both[0]))
            for both, room_s, each in zip(recomputations, rooms_s, waits, strict=True)
        )
        for rooms_s in ([each.usable_s for each in waits], [each.all_s for each in waits])
    )
    share = hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else 1.0
    ends = (most, budget_gib, hidden_s + exposed_s, hidden_s, usable_s, all_s, sum(each.forward_s for each in waits))
    filled_s = sum(decision.simulation.total(stage, "filled_s") for stage in range(job.parallel.pipeline))
    none_s, block, best = stock_within(job, budget_gib)
    hidden_none_s, _, hidden_best = stock_within(at_once(job), budget_gib)
    stock = (none_s, block.step_s, best.step_s, best.setting.name, hidden_none_s, hidden_best.step_s)
    return Row(what, *stock, ours_s, in_place_s, share, *ends, filled_s)


def stock_within(job: Job, budget_gib: float) -> tuple[float, Priced, Priced]:
    """Seconds of stock none, which does not fit; the block of whole layers that does, and the fastest setting of all that do."""
    profile = analytic_profile(job)
    found = list(rivals(job, profile, int(budget_gib * GIB)))
    blocks = [each for each in found if each.setting.method is not None and not each.setting.offload]
    block, best = (min(each, key=lambda price: price.step_s) for each in (blocks, found))
    return priced(job, profile, NONE).step_s, block, best


def under(job: Job, policy: Policy) -> Job:
    return job.model_copy(update={"policy": policy})


def at_once(job: Job) -> Job:
    """The job with links between a node's GPUs that take no time: tensor-parallel collectives use `nvlink`."""
    cluster = job.cluster.model_dump()
    cluster["nvlink"] = {"gb_per_s": 1e9, "efficiency": 1.0, "latency_us": 1e-6}
    return job.model_copy(update={"cluster": Cluster.model_validate(cluster)})


def recomputed_s(decision: Decision, stage: int) -> tuple[float, float]:
    """Seconds of a stage's recomputations in one step: hidden, exposed."""
    predicted = decision.plan.stages[stage].predicted
    return predicted.hidden_recompute_s, predicted.exposed_recompute_s


class Waits(NamedTuple):
    """What the waits of a stage have room for in one step, in seconds of what runs in them as it would take alone."""

    backward_s: float
    """Collectives of backwards, as stock leaves them."""
    received_s: float
    """Receives of gradients."""
    receivable_s: float
    """What of them the recomputations may use that gather nothing, each once for its backward."""
    spared_s: float
    """What of the collectives is not waited for, because an input was gathered before."""
    opened_s: float
    """By how much collectives of backwards are waited for longer, because a weight gradient was put off that hid them."""
    filled_s: float
    """What weight gradients fill of all these."""
    forward_s: float
    """Collectives of forwards that come before another micro-batch's backward."""
    never_s: float
    """What checkpoints recompute, which communicate again and so run in no wait."""

    @property
    def all_s(self) -> float:
        return self.backward_s + self.received_s

    @property
    def usable_s(self) -> float:
        return self.backward_s + self.receivable_s + self.opened_s - self.spared_s - self.filled_s


def received_s(job: Job, profile: Profile, stage: int) -> float:
    """Seconds for which a stage with one chunk waits for a gradient in cool-down: a message and a forward of the next stage."""
    if stage == job.parallel.pipeline - 1:
        return 0.0
    return profile.link_s("p2p", profile.attention.input_bytes) + stage_seconds(job, profile, stage + 1).forward_s


def waits_of(decision: Decision, stage: int) -> Waits:
    """The waits of a stage under a plan."""
    job, profile = decision.job, analytic_profile(decision.job)
    cooldown = cooldown_backwards(job, stage)
    steady = job.microbatches - cooldown
    layer_s = {
        passing: sum(sum(window_lengths_s(profile, passing, each, LayerShape.of(job).gathered_bytes)) for each in DENSE.values())
        for passing in PASSES
    }
    last = stage == job.parallel.pipeline - 1
    message_s = 0.0 if last else profile.link_s("p2p", profile.attention.input_bytes) / profile.interference
    cooldown_s = received_s(job, profile, stage) / profile.interference
    entry, message_bytes = decision.plan.stages[stage], LayerShape.of(job).gathered_bytes
    planned = planned_halves(entry, decision.plan.model.sections_of)
    halves = tuple(treated_halves(entry, planned, Prices(profile)))
    deferred = [(each, tuple(entry.rule_for(layer).weight_gradients)) for layer in entry.layers for each in DENSE.values()]
    opened_s = sum(
        sum(window_lengths_s(profile, "bwd", each, message_bytes, linears))
        - sum(window_lengths_s(profile, "bwd", each, message_bytes))
        for each, linears in deferred
    )
    plain = [half for half in halves if half.planned.recompute and not half.planned.checkpoint]
    free_s = sum(half.price.recompute_s for half in plain if half.planned.gathered is None)
    never_s = sum(half.price.recompute_s + half.price.communicates_s for half in halves if half.planned.checkpoint)
    forward_s = 0.0 if last else steady * layer_s["fwd"]
    return Waits(
        job.microbatches * job.layers_on(stage) * layer_s["bwd"] / profile.interference,
        steady * message_s + cooldown * cooldown_s,
        steady * min(message_s, free_s) + cooldown * min(cooldown_s, free_s),
        job.microbatches * sum(half.spared_s(half.planned.gathered) for half in halves) / profile.interference,
        job.microbatches * opened_s / profile.interference,
        filled_in_backwards_s(decision, stage, profile.interference),
        job.layers_on(stage) * forward_s / profile.interference,
        job.microbatches * never_s,
    )


def filled_in_backwards_s(decision: Decision, stage: int, interference: float) -> float:
    """Seconds of weight gradients in a stage's backwards and receives, as they would take alone."""
    longer = {"bwd": interference, RECV_BACKWARD.partition(".")[0]: 1.0}
    total_s = 0.0
    for each, times in zip(decision.simulation.executed[stage], decision.simulation.times(stage), strict=True):
        for span in each.content.spans:
            kind = (span.window or "").partition(".")[0]
            if span.kind == "weight_gradient" and kind in longer:
                total_s += times * (span.end_s - span.start_s) / longer[kind]
    return total_s


def table(rows: Iterable[Row]) -> str:
    """Markdown. Steps are ratios to stock none."""
    lines = [
        "| layout | none holds | budget | block | best stock: which | ours | in place | hidden | filled | gain "
        "| userbuffers: none, best |"
    ]
    lines.append("|---|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|")
    for each in rows:
        steps = (each.block_s, each.best_stock_s, each.ours_s, each.in_place_s, each.hidden_none_s, each.hidden_best_s)
        block, best, ours, in_place, bare, hidden_best = (f"{seconds / each.none_s:.2f}" for seconds in steps)
        filled = f"{each.filled_s / each.none_s:.2f}"
        which = f"{best}: {each.best_stock}"
        gain = f"{each.best_stock_s / each.ours_s - 1:.0%}"
        sizes = [f"{size:.0f} GiB" for size in (each.none_gib, each.budget_gib)]
        hidden = f"{each.hidden:.0%}"
        figures = [each.what, *sizes, block, which, ours, in_place, hidden, filled, gain, f"{bare}, {hidden_best}"]
        lines.append(f"| {' | '.join(figures)} |")
    return "\n".join(lines)


def small(host_time: str) -> Iterator[Row]:
    """Small layers, on a host that is never late and on one of which a file tells."""
    for what, change in SMALL:
        yield row(what, job_of(change))
        yield row(f"{what}, with host time", job_of({**change, "host_time": host_time}))


if __name__ == "__main__":
    if "--small" in sys.argv:
        found = small(sys.argv[sys.argv.index("--small") + 1])
    else:
        found = rows({"implementation": "local"} if "--local" in sys.argv else {})
    print(json.dumps([each.as_json for each in found], indent=1) if "--json" in sys.argv else table(found))
