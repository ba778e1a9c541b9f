"""What does a gradient that is one update old cost, with which optimizer? A tiny language model, three optimizers of Megatron's.

    python -m benchmarks.delayed_optimizers -o benchmarks/results

As `benchmarks.delayed_gradients`: characters of Python's library, one sequence of 64 in each of two micro-batches per update,
clipping at 1, a warm-up over a tenth of the updates and then a cosine down to zero. Weights, text and rates are the same with
flushes and without; the difference is taken seed by seed. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

from benchmarks.learning_ranks import Course, learned
from benchmarks.results_folder import results_folder
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.whole_file import write_whole
from tests.tiny_jobs import tiny_job

OPTIMIZERS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "AdamW, betas 0.9 and 0.999": ({}, (0.0003, 0.001, 0.003)),
    "SGD, momentum 0.9": ({"optimizer": "sgd", "sgd_momentum": 0.9}, (0.03, 0.1)),
    "SGD": ({"optimizer": "sgd", "sgd_momentum": 0.0}, (0.3, 1.0)),
}
"""By name: its settings in Megatron, and the highest learning rates that are tried."""


@dataclass(frozen=True)
class Row:
    """Validation losses behind the last update, by seed."""

    optimizer: str
    rate: float
    flush: list[float]
    without: list[float]

    @property
    def cells(self) -> Iterator[str]:
        yield from (self.optimizer, f"{self.rate:g}")
        behind = [late - now for now, late in zip(self.flush, self.without, strict=True)]
        for losses, form in ((self.flush, ".3f"), (self.without, ".3f"), (behind, "+.3f")):
            yield f"{statistics.mean(losses):{form}} ({min(losses):{form}}, {max(losses):{form}})"


def courses(updates: int) -> list[tuple[str, Course]]:
    return [
        (name, Course(rate, updates, updates, updates // 10, True, tuple(settings.items())))
        for name, (settings, rates) in OPTIMIZERS.items()
        for rate in rates
    ]


def table(rows: list[Row]) -> str:
    """A Markdown table: means over seeds (lowest, highest)."""
    heads = ("optimizer", "highest rate", "flush", "without flushes", "without, less flush")
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row.cells) + " |" for row in rows)])


def measured(updates: int, seeds: int) -> Iterator[Row]:
    sizes: dict[str, Any] = {"hidden": 64, "ffn": 256, "seq": 64, "vocab": 128, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    job = tiny_job("gpt", pipeline=1, microbatches=2, micro=1, **sizes)
    with RankPool(1, pin=False) as pool:
        for name, course in courses(updates):
            [curves] = pool.run(learned, job, course, seeds, timeout_s=10_000)
            last = {setting: [curve[-1] for curve in of_seeds] for setting, of_seeds in curves.items()}
            yield Row(name, course.rate, last["flush"], last["without flushes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("-o", "--output", type=results_folder, required=True, help="folder")
    given = parser.parse_args()
    command = f"python -m benchmarks.delayed_optimizers --seeds {given.seeds} --updates {given.updates}"
    said = f"`{command}`: validation loss (nats per character), mean over {given.seeds} seeds (lowest, highest)."
    out = given.output / f"{date.today()}-delayed-optimizers"
    rows: list[Row] = []
    for row in measured(given.updates, given.seeds):
        rows.append(row)
        write_whole(
            out.with_suffix(".json"), json.dumps({"command": command, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )
        write_whole(out.with_suffix(".md"), f"# Optimizers on a gradient that is one update old\n\n{said}\n\n{table(rows)}\n")
        print(" | ".join(row.cells), flush=True)


if __name__ == "__main__":
    main()
