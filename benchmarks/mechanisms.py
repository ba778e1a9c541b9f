"""What each mechanism of the planner is worth: the step of every row with the mechanism, and with it switched off.

    python -m benchmarks.mechanisms                            every mechanism on every row
    python -m benchmarks.mechanisms --only "ahead"             mechanisms whose name has this word
    python -m benchmarks.mechanisms --rows when_not experts    these tables alone
    python -m benchmarks.mechanisms --launches FOLDER          and the launches of a folder, with what their cards hold

A mechanism stays if some row loses 1 % of its step without it, or all rows lose 0.3 % in the mean, or some row no longer fits.
Steps are simulated, without the optimizer's update. A mechanism is switched off by a patch here, not by a flag of the package.
`lines`: those that only it needs.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks import never_less, when_not, when_not_experts
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import bundled_configs, load_job
from megatron_lynx.errors import Infeasible, LynxError
from megatron_lynx.planner import decide, decision, filling, partitioning
from megatron_lynx.planner.partitioning import partitioned
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.solver import offload, options, stages
from megatron_lynx.solver.options import HalfOptions
from megatron_lynx.solver.stages import Stages
from megatron_lynx.stock import priced
from megatron_lynx.units import GIB

Off = tuple[Any, str, Any]
"""An object, its attribute, and what stands there while the mechanism is off."""


@dataclass(frozen=True)
class Mechanism:
    """`code`: modules, functions and properties that are there for it alone."""

    name: str
    code: tuple[Any, ...]
    off: tuple[Off, ...]

    @property
    def lines(self) -> int:
        return sum(len(inspect.getsource(_function(each)).splitlines()) for each in self.code)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        with ExitStack() as patches:
            for owner, name, instead in self.off:
                patches.enter_context(patch.object(owner, name, instead))
            yield


def _function(code: Any) -> Any:
    if isinstance(code, property):
        return code.fget
    return code.func if isinstance(code, cached_property) else code


def _of_class(cls: type, *names: str) -> tuple[Any, ...]:
    return tuple(vars(cls)[name] for name in names)


def _spread_evenly(parted: Callable[..., list[Stages]]) -> Callable[..., list[Stages]]:
    return lambda job, profile: parted(job, profile)[:1]


IN_PIECES, SENT_FIRST = "weight gradients in pieces", "gradients sent before weight gradients"

MECHANISMS = (
    Mechanism(
        "weight gradients in waits",
        (filling,),
        ((decision, "why_none_deferred", lambda job: "switched off"),),
    ),
    Mechanism(
        "weight gradients with several chunks: with forwards or without",
        (),
        ((decision, "FILLINGS", decision.FILLINGS[:2]),),
    ),
    Mechanism(IN_PIECES, (), ((filling, "PIECES", ()),)),
    Mechanism(
        SENT_FIRST,
        (filling.Filling.send_first,),
        ((filling.Filling, "send_first", lambda chunk: None),),
    ),
    Mechanism(
        "recomputation in parts of several waits",
        (options._parted, *_of_class(HalfOptions, "_stops")),
        ((HalfOptions, "_stops", lambda halves, section, items, price: {}),),
    ),
    Mechanism(
        "checkpoints begin ahead",
        _of_class(HalfOptions, "_ways", "_spared_s"),
        ((options, "ahead_to", lambda *half, **how: None), (options, "may_gather_ahead", lambda *half, **how: False)),
    ),
    Mechanism(
        "checkpoints go on in waits",
        _of_class(HalfOptions, "_with_rest_in_wait"),
        ((HalfOptions, "_with_rest_in_wait", lambda problems, section, checkpoint: checkpoint),),
    ),
    Mechanism("offloading within micro-batches", (offload,), ((stages, "may_go_within", lambda job: False),)),
    Mechanism(
        "layers of stages as is fastest by the closed form",
        (partitioning,),
        ((decision, "partitioned", _spread_evenly(partitioned)),),
    ),
)


class Row(NamedTuple):
    name: str
    job: Job


def bundled() -> Iterator[Row]:
    """With all of their cards, and with two thirds of them."""
    for path in sorted((bundled_configs() / "jobs").glob("*.yaml")):
        job = load_job(path)
        if job.policy == "planned" and job.cluster.matmul is not None:
            yield Row(path.stem, job)
            yield Row(f"{path.stem}, two thirds", when_not.on_devices_of(job, job.memory_budget_bytes / GIB / 1.5))


def of_when_not() -> Iterator[Row]:
    for what, change in when_not.CASES:
        job = when_not.within(when_not.job_of(change))
        yield Row(f"{what}, in place", job)
        yield Row(what, job.model_copy(update={"offload_ratio": "auto"}))


def of_experts() -> Iterator[Row]:
    for what, change in when_not_experts.CASES:
        job = when_not_experts.job_of(change)
        modules = priced(job, analytic_profile(job), when_not_experts.cheapest(job))
        overlapping = [own for own, _ in when_not_experts.with_overlap(job)]
        names = ("", ", overlapped", ", overlapped, weight gradients delayed")
        for name, own in zip(names, (job, *overlapping), strict=False):
            yield Row(f"{what}{name}", when_not.on_devices_of(own, modules.most_bytes / GIB))


def of_never_less(folder: Path | None = None) -> Iterator[Row]:
    """Bundled jobs at stock full's bytes; or launches, with what their cards hold."""
    for name, found in never_less.asked(folder):
        if isinstance(found, LynxError):
            continue
        job, setting = found
        job = job.model_copy(update={"policy": "planned"})
        if folder is None:
            job = when_not.on_devices_of(job, priced(job, analytic_profile(job), setting).most_bytes / GIB)
            name = f"{name}, stock's bytes"
        yield Row(name, job)


def of_offloading() -> Iterator[Row]:
    """Bundled jobs at stock full's bytes, with copies to the host."""
    for name, job in of_never_less():
        yield Row(f"{name}, copies", job.model_copy(update={"offload_ratio": "auto"}))


TABLES: Mapping[str, Callable[[], Iterator[Row]]] = {
    "bundled": bundled,
    "when_not": of_when_not,
    "experts": of_experts,
    "never_less": of_never_less,
    "offloading": of_offloading,
}


def step_s(job: Job) -> float | None:
    """Seconds of a step under the job's plan; None where none fits."""
    try:
        return decide(job, analytic_profile(job)).simulation.step_s
    except Infeasible:
        return None


class Worth(NamedTuple):
    """Parts of a step, by row that is planned with the mechanism and without it."""

    losses: Mapping[str, float]
    lost: tuple[str, ...]
    """Rows in which nothing fits without it."""


def worth(mechanism: Mechanism, rows: Iterable[Row], steps_s: Mapping[str, float]) -> Worth:
    """`steps_s`: of the rows with all mechanisms."""
    losses, lost = dict[str, float](), list[str]()
    with mechanism.switched_off():
        for row in rows:
            without_s = step_s(row.job)
            if without_s is None:
                lost.append(row.name)
            else:
                losses[row.name] = without_s / steps_s[row.name] - 1
    return Worth(losses, tuple(lost))


def line(mechanism: Mechanism, found: Worth) -> str:
    worst = max(found.losses, key=lambda name: found.losses[name])
    mean, most = statistics.mean(found.losses.values()), found.losses[worst]
    lost = f"; {len(found.lost)} no longer fit" if found.lost else ""
    return f"| {mechanism.name} | {mechanism.lines} | {mean:+.3%} | {most:+.2%}: {worst}{lost} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--rows", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--launches", type=Path)
    asked = parser.parse_args()
    rows = [row for name in asked.rows for row in TABLES[name]()]
    rows += [] if asked.launches is None else of_never_less(asked.launches)
    steps_s = {row.name: found for row in rows if (found := step_s(row.job)) is not None}
    planned = [row for row in rows if row.name in steps_s]
    print(f"{len(planned)} rows\n\n| mechanism | lines | mean loss | worst loss |\n|---|--:|--:|---|", flush=True)
    for mechanism in MECHANISMS:
        if asked.only in mechanism.name:
            print(line(mechanism, worth(mechanism, planned, steps_s)), flush=True)


if __name__ == "__main__":
    main()
