"""What stock's best setting leaves to plans: where its step goes, the best plan, and bounds. Simulated, within the card's memory.

    python -m benchmarks.value_added FOLDER      FOLDER/*.args and *.yaml: launches as for `benchmarks.launches`, and jobs

Parts of the step of stock's best are of the stage with most layers, in percent; `rest` is GEMMs and all else that is not listed,
`wgrad` the part of it that may be delayed. Bounds: the plan's step, if weight gradients filled what it leaves of its waits, then
of the bubble, over stock's. They know no order, pieces or memory. Userbuffers hide nothing, the middle, or all that GEMMs can.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.launches import advised
from megatron_lynx.advise import Answer, answered
from megatron_lynx.advise.today import Row, Stock, row_of
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import load_job
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.prices import weight_gradient
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import LynxError
from megatron_lynx.planner.variants import Planned
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.price import Pricing
from megatron_lynx.stock.seconds import layer_seconds
from megatron_lynx.stock.setting import StockSetting
from megatron_lynx.stock.stage import StockStage

COLUMNS = ("rest", "wgrad", "recompute", "TP", "exchanges", "bubble", "update")


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

    def left_s(self, planned: Planned, interference: float) -> tuple[float, float]:
        """Seconds of weight gradients that would still fit into the plan's waits, and into these and the bubble."""
        plan, job = planned.draft.plan, planned.job
        stage = fullest_stage(job)
        hidden = [entry.predicted for entry in plan.chunks_of(stage)]
        gradients_s = sum(each.weight_gradient_hidden_s for each in hidden)
        waits_s = 0.0 if job.userbuffers else self.TP + self.exchanges
        free_s = max(0.0, waits_s / interference - gradients_s - sum(each.hidden_recompute_s for each in hidden))
        return min(free_s, self.wgrad - gradients_s), min(free_s + self.bubble, self.wgrad - gradients_s)


def fullest_stage(job: Job) -> int:
    """The stage with most layers."""
    stages, chunks = range(job.parallel.pipeline), range(job.chunks)
    return max(stages, key=lambda stage: sum(len(job.layers_of(stage, chunk)) for chunk in chunks))


def parts_of(job: Job, profile: Profile, setting: StockSetting) -> Parts:
    """Return where a stock step goes, with userbuffers hiding nothing."""
    shape, passes = LayerShape.of(job), dict.fromkeys(("fwd", "bwd"))
    seconds = dict.fromkeys(("wgrad", "recompute", "TP", "exchanges"), 0.0)
    stage = fullest_stage(job)
    layers = [layer for chunk in StockStage(job, setting, stage).chunks for layer in chunk]
    for layer in layers:
        for half, section in zip(layer_seconds(shape, profile, setting, layer.kind), layer.kind, strict=True):
            seconds["recompute"] += (half.recomputed_whole if layer.whole else half).again_s
            if section.exchanges and profile.experts is not None:
                seconds["exchanges"] += 0.0 if setting.overlap else sum(map(profile.experts.waits_s, passes))
            else:
                seconds["TP"] += sum(sum(window_lengths_s(profile, p, section, profile.message_bytes)) for p in passes)
            if not (section.captured or section.opaque):
                seconds["wgrad"] += sum(weight_gradient(profile, section, linear).seconds for linear in section.linears)
    seconds = {name: job.microbatches * part for name, part in seconds.items()}
    pricing, update = Pricing(job, profile, setting), update_s(job, profile)
    busy_s = pricing.busy_s
    rest_s = busy_s - sum(part for name, part in seconds.items() if name != "wgrad")
    return Parts(rest=rest_s, bubble=max(0.0, pricing.price.step.most_s - busy_s), update=update, **seconds)


def ratios(plan: Row, stock: Row) -> tuple[float, float, float]:
    """Plan over stock, with userbuffers hiding nothing, the middle, and all."""
    return plan.step.most_s / stock.step.most_s, plan.expected_s / stock.expected_s, plan.step.least_s / stock.step.least_s


def line(name: str, answer: Answer, stock: Stock, planned: Planned) -> tuple[str, list[float]]:
    """A row of the table; its ratios and bounds."""
    profile, plan = analytic_profile(answer.job), row_of(planned)
    parts = parts_of(answer.job, profile, stock.setting)
    bounds = ((plan.step.most_s - left_s) / stock.row.step.most_s for left_s in parts.left_s(planned, profile.interference))
    theirs = [stock.row, *(near.stock.row for near in answer.near if near.stock)]
    ours = [plan, *(row_of(near.planned) for near in answer.near if near.planned)]
    over_layouts = min(row.expected_s for row in ours) / min(row.expected_s for row in theirs)
    figures = [*ratios(plan, stock.row), *bounds, over_layouts]
    shares = (f"{100 * getattr(parts, column) / parts.step_s:.1f}" for column in COLUMNS)
    return _row([name, stock.setting.name, *shares, *thousandths(figures)]), figures


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def thousandths(figures: Iterable[float]) -> list[str]:
    return [f"{figure:.3f}" for figure in figures]


def answers(folder: Path) -> Iterator[tuple[str, Answer]]:
    for path in sorted([*folder.glob("*.args"), *folder.glob("*.yaml")]):
        print(path.stem, file=sys.stderr, flush=True)
        try:
            if path.suffix == ".args":
                answer = advised(path).answer
            else:
                job = load_job(str(path))
                answer = answered(job, analytic_profile(job), None, copies=True)
        except LynxError as error:
            print(error, file=sys.stderr)
            continue
        if answer is not None:
            yield path.stem, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    names = ("launch", "stock's best", *COLUMNS, "plan/stock", "UB half", "UB all", "waits", "and bubble", "over layouts")
    print(_row(names), f"|---|---|{'--:|' * (len(names) - 2)}", sep="\n")
    found = []
    for name, answer in answers(parser.parse_args().folder):
        if answer.stock is not None and answer.planned is not None:
            text, figures = line(name, answer, answer.stock, answer.planned)
            found.append(figures)
            print(text, flush=True)
    means = thousandths(map(fmean, zip(*found, strict=True)))
    print(_row([f"mean of {len(found)}", *[""] * (1 + len(COLUMNS)), *means]))


if __name__ == "__main__":
    main()
