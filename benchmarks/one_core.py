"""What benchmarks of planning share: one core, a line for each row as it comes, and results as a table and as data."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import date
from typing import Any, TypeVar

from benchmarks.results_folder import results_folder
from megatron_lynx.measure.measurement import Links, this_machine

Row = TypeVar("Row")


def run(
    name: str,
    description: str | None,
    rounds: int,
    rows: Callable[[int], Iterable[Row]],
    line: Callable[[Row], str],
    markdown: Callable[[Sequence[Row], str], str],
) -> None:
    """Ask the command line for `rounds` (this many if it does not say) and a folder, then take, print and write every row."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0] if description else None)
    parser.add_argument("--rounds", type=int, default=rounds, help="every figure is the median of so many")
    parser.add_argument("-o", "--output", type=results_folder, help="folder for the results")
    asked = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found: list[Any] = []
    for row in rows(asked.rounds):
        print(line(row), flush=True)
        found.append(row)
    machine = this_machine(Links(kind="none"))
    text = markdown(found, f"One core of {machine.cpu}, Python {machine.python}; medians of {asked.rounds} rounds.")
    print(text)
    if asked.output is not None:
        stem = asked.output / f"{date.today()}-{name}"
        stem.with_suffix(".md").write_text(text)
        content = {"machine": machine.model_dump(), "rounds": asked.rounds, "rows": [asdict(row) for row in found]}
        stem.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")
