"""Advice about every launch of a folder, as a table: today, stock's best, the plan, the best neighbour; and why some get no plan.
Simulated.

python -m benchmarks.launches FOLDER                       FOLDER/*.args, one word a line, `# cluster: C` in their headers
python -m scripts.make_pages launches --launches FOLDER    the same as docs/generated/launches.md
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_lynx.advise import Answer, answered, verdict
from megatron_lynx.advise.today import Row, asked_launch, row_of
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch_arguments.command_line import read_launch_file
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.units import GIB

LONGEST = 16
"""Characters of a flag's value that is told."""


@dataclass(frozen=True)
class Advised:
    """One launch. `answer` is None where it cannot even be priced, for these `problems`."""

    name: str
    gpus: str
    answer: Answer | None
    problems: tuple[Problem, ...]
    cpu_s: float


def advised(path: Path) -> Advised:
    """As `megatron-lynx advise --launch-file PATH` answers."""
    began_s = time.process_time()
    file = read_launch_file(path)
    cluster = file.cluster or "h100-80g"
    try:
        asked = asked_launch(file.words, cluster)
    except ConfigError as error:
        return Advised(path.stem, cluster, None, error.problems, time.process_time() - began_s)
    answer = answered(asked.job, analytic_profile(asked.job), asked.reading, refused=asked.refused, copies=True)
    return Advised(path.stem, f"{asked.job.gpus} {cluster}", answer, answer.problems, time.process_time() - began_s)


def table(found: list[Advised]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "| launch | GPUs | today | | stock's best | | plan | plan / stock's best | best neighbour | stock's best | plan |"
    yield "|---|---|---|--:|---|--:|--:|--:|---|--:|--:|"
    for each in found:
        answer = each.answer
        if answer is None:
            continue
        stock = None if answer.stock is None else answer.stock.row
        setting = "nothing fits" if answer.stock is None else answer.stock.setting.name
        near = min(answer.near, key=lambda near: near.fastest.expected_s, default=None)
        changed = "" if near is None else f"`{answer.changed(near)}`".replace("|", "\\|")
        theirs = None if near is None or near.stock is None else near.stock.row
        ours = None if near is None or near.planned is None else row_of(near.planned)
        cells = (
            *(each.name, each.gpus, answer.launch.setting, _figures(answer.launch.row)),
            *(setting, _figures(stock), _figures(answer.plan), _ratio(answer.plan, stock)),
            *(changed, _figures(theirs), _figures(ours)),
        )
        yield f"| {' | '.join(cells)} |"
    yield from ("", _mean(found), "", "No plan, and why:", "")
    for each in found:
        if each.problems:
            yield f"* **{each.name}**: {_why_none(each)}"


def _mean(found: list[Advised]) -> str:
    """Over the launches that have both."""
    pairs = [(each.answer.plan, each.answer.stock) for each in found if each.answer is not None]
    ratios = [plan.expected_s / stock.row.expected_s for plan, stock in pairs if plan is not None and stock is not None]
    faster, slower = sum(ratio < 0.99 for ratio in ratios), sum(ratio > 1.001 for ratio in ratios)
    mean = sum(ratios) / len(ratios) if ratios else 1.0
    said = f"{mean:.3f} in the mean over {len(ratios)} launches; over 1 % faster in {faster}, slower in {slower}"
    return f"Plan / stock's best in the launch's layout, by the middles of ranges: {said}."


def _why_none(each: Advised) -> str:
    """The flags by name; where nothing but memory is in the way, the verdict."""
    if each.answer is not None and not each.answer.refused:
        return verdict(each.answer).text
    return ", ".join(dict.fromkeys(map(_named, each.problems)))


def _named(problem: Problem) -> str:
    """A flag, and what it says where that is short."""
    found = "" if problem.finding in ("given", "nothing") or len(problem.finding) > LONGEST else f" {problem.finding}"
    return f"`{problem.where}{found}`".replace("|", "\\|")


def _figures(row: Row | None) -> str:
    return "none" if row is None else f"{row.step.in_words}, {row.memory_bytes / GIB:.1f} GiB"


def _ratio(row: Row | None, before: Row | None) -> str:
    return "" if row is None or before is None else f"{row.expected_s / before.expected_s:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    found = []
    for path in sorted(arguments.folder.glob("*.args")):
        found.append(advised(path))
        print(f"{found[-1].name}: {found[-1].cpu_s:.1f} s of CPU", file=sys.stderr, flush=True)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
