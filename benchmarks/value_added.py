"""What plans gain over stock's best setting, mechanism by mechanism, and what is left. Simulated, within the card's memory.

    python -m benchmarks.value_added FOLDER              FOLDER/*.args and *.yaml: launches as for `benchmarks.launches`, and jobs
    python -m benchmarks.value_added FILE FILE           some of them
    python -m benchmarks.value_added FOLDER --layouts    and the best plan over the best setting, with layouts one step away

Columns: a plan's step over that of stock's best.

    choice    the fastest plan, with the flags as its own choice
    pieces    and weight gradients in pieces
    first     and gradients sent before weight gradients: all that is built
    waits     bound: `pieces`, if weight gradients filled what is left of its waits
    pipe      bound: and of its bubble. Both know no order, pieces or memory

A row has the middles of ranges. The means are those of launches of which it is known that userbuffers hide nothing, the middle,
or all that GEMMs can: stock's best setting and the best plan are chosen for each.
The last table is where the step of stock's best goes, on the stage with most layers, in percent; `rest` is GEMMs and all that is
not listed, `wgrad` the part of it that may be delayed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.mechanisms import IN_PIECES, MECHANISMS, SENT_FIRST
from megatron_lynx.advise import Answer, answered
from megatron_lynx.advise.today import Stock, as_stock, asked_launch, row_of, stock_row
from megatron_lynx.anatomy import PASSES
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import load_job
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.section import weight_gradient
from megatron_lynx.cost.step import StepRange
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch_arguments import Reading
from megatron_lynx.launch_arguments.command_line import read_launch_file
from megatron_lynx.planner import Decision
from megatron_lynx.planner.decision import fastest_decision
from megatron_lynx.planner.variants import variants
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.layer import layer_seconds
from megatron_lynx.stock.legality import NEWEST
from megatron_lynx.stock.price import priced
from megatron_lynx.stock.setting import StockSetting
from megatron_lynx.stock.stage import StockStage

RATIOS = ("choice", "pieces", "first", "waits", "pipe")
PARTS = ("rest", "wgrad", "recomp", "TP", "exch", "bubble", "update")
USERBUFFERS = ("nothing", "the middle", "all")
WIDTH = 80


class Subject(NamedTuple):
    """A launch or a job."""

    name: str
    job: Job
    profile: Profile
    reading: Reading | None = None
    refused: tuple[Problem, ...] = ()

    def answer(self, *, near: bool = False) -> Answer:
        """As `megatron-lynx advise` answers."""
        return answered(self.job, self.profile, self.reading, refused=self.refused, near=near, copies=True)


def subject_of(path: Path) -> Subject:
    if path.suffix != ".args":
        job = load_job(str(path))
        return Subject(path.stem, job, analytic_profile(job))
    file = read_launch_file(path)
    asked = asked_launch(file.words, file.cluster or "h100-80g")
    return Subject(path.stem, asked.job, analytic_profile(asked.job), asked.reading, asked.refused)


@dataclass(frozen=True)
class Parts:
    """Seconds of a stock step. `wgrad`: of linears whose weight gradients may be delayed, part of `rest`."""

    rest: float
    wgrad: float
    recompute: float
    TP: float
    exchanges: float
    bubble: float
    update: float

    @property
    def step_s(self) -> float:
        return self.rest + self.recompute + self.TP + self.exchanges + self.bubble + self.update

    def left_s(self, plan: Decision) -> tuple[float, float]:
        """Seconds of weight gradients that would still fit into the plan's waits, and into these and the bubble."""
        stage = fullest_stage(plan.job)
        hidden = [entry.predicted for entry in plan.plan.chunks_of(stage)]
        gradients_s = sum(each.weight_gradient_hidden_s for each in hidden)
        waits_s = 0.0 if plan.job.userbuffers else self.TP + self.exchanges
        recomputed_s = sum(each.hidden_recompute_s for each in hidden)
        free_s = max(0.0, waits_s / plan.profile.interference - gradients_s - recomputed_s)
        return min(free_s, self.wgrad - gradients_s), min(free_s + self.bubble, self.wgrad - gradients_s)


def fullest_stage(job: Job) -> int:
    """The stage with most layers."""
    stages, chunks = range(job.parallel.pipeline), range(job.chunks)
    return max(stages, key=lambda stage: sum(len(job.layers_of(stage, chunk)) for chunk in chunks))


def parts_of(job: Job, profile: Profile, setting: StockSetting) -> Parts:
    """Return where a stock step goes, with userbuffers hiding nothing."""
    shape = LayerShape.of(job)
    seconds = dict.fromkeys(("wgrad", "recompute", "TP", "exchanges"), 0.0)
    stage = fullest_stage(job)
    layers = [layer for chunk in StockStage(job, setting, stage).chunks for layer in chunk]
    for layer in layers:
        for half, section in zip(layer_seconds(shape, profile, setting, layer.kind), layer.kind, strict=True):
            seconds["recompute"] += half.forward_s if layer.whole else half.again_s
            if section.exchanges and profile.experts is not None:
                seconds["exchanges"] += 0.0 if setting.overlap else sum(map(profile.experts.waits_s, PASSES))
            else:
                seconds["TP"] += sum(sum(window_lengths_s(profile, p, section, profile.message_bytes)) for p in PASSES)
            if not (section.captured or section.opaque):
                seconds["wgrad"] += sum(weight_gradient(profile, section, linear).seconds for linear in section.linears)
    seconds = {name: job.microbatches * part for name, part in seconds.items()}
    price, update = priced(job, profile, setting), update_s(job, profile)
    busy_s = job.microbatches * max(price.microbatch_s(each).both_s for each in range(job.parallel.pipeline))
    rest_s = busy_s - sum(part for name, part in seconds.items() if name != "wgrad")
    return Parts(rest=rest_s, bubble=max(0.0, price.step.most_s - busy_s), update=update, **seconds)


Times = tuple[float, float, float]
"""Seconds or ratios, with userbuffers hiding nothing, the middle and all."""


def times_of(step: StepRange) -> Times:
    return step.most_s, step.expected_s, step.least_s


def least(times: Iterable[Times]) -> Times:
    nothing, middle, everything = map(min, zip(*times, strict=True))
    return nothing, middle, everything


def over(times: Times, stock: Times) -> Times:
    nothing, middle, everything = (ours / theirs for ours, theirs in zip(times, stock, strict=True))
    return nothing, middle, everything


def stocks(subject: Subject, stock: Stock) -> Times:
    """Seconds of stock's best setting."""
    job = as_stock(subject.job)
    return least(times_of(row.step) for row in (stock.row, *(stock_row(job, subject.profile, price) for price in stock.rivals)))


def plans(subject: Subject, without: Collection[str] = ()) -> list[Decision]:
    """Return the fastest plan with these mechanisms of the planner switched off; and the plan with the other choice about
    userbuffers, if there is one."""
    with ExitStack() as off:
        for mechanism in MECHANISMS:
            if mechanism.name in without:
                off.enter_context(mechanism.switched_off())
        answer = subject.answer()
        best = answer.copies or answer.without_copies
        return [] if best is None else [best, *with_other_userbuffers(subject, best)]


def with_other_userbuffers(subject: Subject, plan: Decision) -> Iterator[Decision]:
    for other in variants(plan.asked, NEWEST if subject.reading is None else subject.reading.given.release):
        if other.userbuffers != plan.job.userbuffers:
            with suppress(LynxError):
                yield fastest_decision(other, subject.profile)


class Value(NamedTuple):
    """One launch. `over_layouts`: the best plan over the best setting, of the launch's layout and those one step away."""

    name: str
    parts: Parts
    ratios: dict[str, Times]
    over_layouts: float


def value_of(subject: Subject, *, layouts: bool = False) -> Value | None:
    """Return None if there is no plan, or no setting of stock's fits."""
    answer = subject.answer(near=layouts)
    if answer.stock is None or answer.planned is None:
        return None
    stock, parts = stocks(subject, answer.stock), parts_of(answer.job, subject.profile, answer.stock.setting)
    whole, pieces, first = (plans(subject, without) for without in ((SENT_FIRST, IN_PIECES), (SENT_FIRST,), ()))
    columns = [[times_of(plan.step) for plan in some] for some in (whole, pieces, first)]
    for bound in range(2):
        columns.append([times_of(plan.step.plus(-parts.left_s(plan)[bound])) for plan in pieces])
    theirs = [answer.stock.row, *(near.stock.row for near in answer.near if near.stock)]
    ours = [row_of(answer.planned), *(row_of(near.planned) for near in answer.near if near.planned)]
    over_layouts = min(row.expected_s for row in ours) / min(row.expected_s for row in theirs)
    ratios = {name: over(least(column), stock) for name, column in zip(RATIOS, columns, strict=True)}
    return Value(subject.name, parts, ratios, over_layouts)


def row(name: str, cells: Sequence[str], columns: Sequence[str]) -> str:
    """A line of Markdown. The middle of a name that is too long is left out."""
    widths = [max(5, len(column)) for column in columns]
    room = WIDTH - 4 - sum(width + 3 for width in widths)
    if len(name) > room:
        name = f"{name[: room // 2]}…{name[room // 2 + 1 - room :]}"
    return f"| {name:{room}} | {' | '.join(f'{cell:>{width}}' for cell, width in zip(cells, widths, strict=True))} |"


def head(name: str, columns: Sequence[str]) -> str:
    text = row(name, columns, columns)
    rule = "|".join("-" * (len(cell) - at) + ":" * at for at, cell in enumerate(text.strip("|").split("|")) if at < 1)
    return f"{text}\n|{rule}|" + "".join("-" * (max(5, len(column)) + 1) + ":|" for column in columns)


def ratio_cells(value: Value, columns: Sequence[str]) -> list[str]:
    ratios = {name: times[1] for name, times in value.ratios.items()} | {"layouts": value.over_layouts}
    return [f"{ratios[name]:.3f}" for name in columns]


def means(found: Sequence[Value]) -> Iterator[str]:
    yield head(f"mean of {len(found)}, userbuffers hide", RATIOS)
    for at, hidden in enumerate(USERBUFFERS):
        yield row(hidden, [f"{fmean(value.ratios[name][at] for value in found):.3f}" for name in RATIOS], RATIOS)


def parts_table(found: Sequence[Value]) -> Iterator[str]:
    yield head("stock's best, percent", PARTS)
    for value in found:
        seconds = vars(value.parts).values()
        yield row(value.name, [f"{100 * part / value.parts.step_s:.1f}" for part in seconds], PARTS)


def values(paths: Sequence[Path], *, layouts: bool) -> Iterator[Value]:
    """One launch after the other. What has none, and why, goes to stderr."""
    for number, path in enumerate(paths, 1):
        began_s, why = time.perf_counter(), ""
        try:
            value = value_of(subject_of(path), layouts=layouts)
        except LynxError as error:
            value, why = None, f": {str(error).splitlines()[0]}"
        if value is not None:
            yield value
        else:
            why = why or ": no plan, or nothing of stock's fits"
        print(f"{number} of {len(paths)}, {time.perf_counter() - began_s:.0f} s: {path.stem}{why}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--layouts", action="store_true", help="search layouts one step away, too")
    asked = parser.parse_args()
    paths = [file for path in asked.paths for file in ([*path.glob("*.args"), *path.glob("*.yaml")] if path.is_dir() else [path])]
    columns = (*RATIOS, *(["layouts"] if asked.layouts else []))
    print(head("plan / stock's best", columns), flush=True)
    found = []
    for value in values(sorted(paths), layouts=asked.layouts):
        found.append(value)
        print(row(value.name, ratio_cells(value, columns), columns), flush=True)
    if found:
        print("", *means(found), "", *parts_table(found), sep="\n")


if __name__ == "__main__":
    main()
