"""Does a gradient that is one update old learn as well? A small language model, with flushes and without.

    python -m benchmarks.delayed_gradients -o benchmarks/results

Characters of Python's library, two stages, two micro-batches per update, Adam with clipping; weights, text and learning rates are
the same for both; weights and text differ between seeds. Validation loss by the number of updates; noise is the spread over
seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.learning_ranks import Course, learned
from benchmarks.results_folder import results_folder
from megatron_lynx.testbed.ranks import run_ranks
from tests.tiny_jobs import tiny_job


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
    parser.add_argument("--rate", type=float, default=0.0005, help="Adam's highest learning rate")
    parser.add_argument("--warmup", type=int, default=0, help="updates of a linear rise to it")
    parser.add_argument("--decay", action="store_true", help="a cosine down to nearly zero behind the warm-up")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--micro", type=int, default=8, help="sequences of 64 characters in each of the two micro-batches")
    parser.add_argument(
        "--pipeline", type=int, default=2, help="stages; the rule is the same with any number, and 1 needs one core"
    )
    parser.add_argument("-o", "--out", type=results_folder, default=Path())
    given = parser.parse_args()
    sizes: dict[str, Any] = {"hidden": 64, "ffn": 256, "seq": 64, "vocab": 128, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    job = tiny_job("gpt", pipeline=given.pipeline, microbatches=2, micro=given.micro, **sizes)
    course = Course(given.rate, given.updates, given.every, given.warmup, given.decay)
    curves = run_ranks(learned, job.gpus, job, course, given.seeds, pin=False, timeout_s=10_000)[-1]
    name = f"{date.today()}-delayed-gradients-{given.rate}{'-decay' if given.decay else ''}-micro-{given.micro}"
    write(curves, course, f"python -m benchmarks.delayed_gradients {_as_given(given)}", given.out / name)


def _as_given(given: argparse.Namespace) -> str:
    """The options again, but where the answer goes."""
    values = {name: value for name, value in vars(given).items() if name != "out" and value is not False}
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in values.items())


def write(curves: dict[str, list[list[float]]], course: Course, command: str, out: Path) -> None:
    """Figure, table and numbers."""
    picture(curves, course.every, out.with_name(f"{out.name}.png"))
    out.with_name(f"{out.name}.json").write_text(
        json.dumps({"command": command, "course": asdict(course), "curves": curves}, indent=1) + "\n"
    )
    text = f"# A gradient that is one update old\n\n`{command}`: validation loss, mean over seeds (lowest, highest).\n\n"
    out.with_name(f"{out.name}.md").write_text(f"{text}{table(curves, course.every)}\n")
    print(table(curves, course.every))


if __name__ == "__main__":
    main()
