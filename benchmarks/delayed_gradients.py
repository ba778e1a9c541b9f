"""Does a gradient that is one update old learn as well? A small language model, with flushes and without.

    python -m benchmarks.delayed_gradients -o benchmarks/results

Characters of Python's library, two stages, two micro-batches per update, Adam with clipping; weights, text and learning rate are
the same for both, and differ between seeds. Validation loss by the number of updates; noise is the spread over seeds.
"""

from __future__ import annotations

import argparse
import statistics
from datetime import date
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.learning_ranks import learned
from megatron_lynx.testbed.ranks import run_ranks
from megatron_lynx.testbed.tiny_jobs import tiny_job


def table(curves: dict[str, list[list[float]]], every: int) -> str:
    """A Markdown table: mean over seeds (lowest, highest)."""
    names = list(curves)
    lines = ["| updates | " + " | ".join(names) + " |", "|--:" * (1 + len(names)) + "|"]
    for index in range(len(curves[names[0]][0])):
        cells = []
        for name in names:
            losses = [curve[index] for curve in curves[name]]
            cells.append(f"{statistics.mean(losses):.3f} ({min(losses):.3f}, {max(losses):.3f})")
        lines.append(f"| {index * every} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(curves: dict[str, list[list[float]]], every: int, path: Path) -> None:
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, colour in zip(curves, ("tab:blue", "tab:orange"), strict=True):
        for seed, curve in enumerate(curves[name]):
            places = [index * every for index in range(len(curve))]
            axes.plot(places, curve, color=colour, alpha=0.7, linewidth=1, label=name if seed == 0 else None)
    axes.set(xlabel="updates", ylabel="validation loss (nats per character)")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.0005, help="Adam's learning rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("-o", "--out", type=Path, default=Path())
    given = parser.parse_args()
    sizes: dict[str, Any] = {"hidden": 64, "ffn": 256, "seq": 64, "vocab": 128, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    job = tiny_job("gpt", pipeline=2, microbatches=2, micro=8, **sizes)
    curves = run_ranks(learned, 2, job, given.rate, given.seeds, given.updates, given.every, timeout_s=3600)[-1]
    name = f"{date.today()}-delayed-gradients-{given.rate}"
    picture(curves, given.every, given.out / f"{name}.png")
    arguments = f"--rate {given.rate} --seeds {given.seeds} --updates {given.updates} --every {given.every}"
    command = f"python -m benchmarks.delayed_gradients {arguments}"
    text = f"# A gradient that is one update old\n\n`{command}`: validation loss, mean over seeds (lowest, highest).\n\n"
    (given.out / f"{name}.md").write_text(f"{text}{table(curves, given.every)}\n")
    print(table(curves, given.every))


if __name__ == "__main__":
    main()
