"""The same launch under stock recomputation, none, selective and full, and under its plan; what Megatron's own log lines say.

    python scripts/launches/sweep.py scripts/launches/llama3_8b.sh [-o FOLDER] [-- arguments of Megatron's]
    python scripts/launches/sweep.py --logs none=none.log full=full.log plan=plan.log      jobs that have run already

    setting     step     ratio   memory    losses   recomputations: in windows / on demand
    none      1.234 s    1.000   57.1 GiB  -
    plan      1.240 s    1.005   44.0 GiB  equal    1920 / 0

A step is the median of what Megatron prints as elapsed time, without the first ones; memory is the largest `max allocated` that
any rank prints. Losses are equal if every digit of loss and gradient norm is the first setting's, at every iteration. Expect that
where stock repeats itself (`--deterministic-mode`, no atomics in attention). Stock's layers are divided evenly between
stages, the plan's as it has them: where the two differ, so do first weights, and losses.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

SETTINGS = ("none", "selective", "full", "plan")
ITERATION = re.compile(
    r" iteration +(?P<number>\d+)/.*elapsed time per iteration \(ms\): (?P<ms>\d+\.?\d*) .*"
    r"lm loss: (?P<loss>\S+) .*grad norm: (?P<norm>\S+) "
)
MEMORY = re.compile(r"memory \(MB\) .*max allocated: (?P<mib>\d+\.?\d*)")
RECOMPUTATIONS = re.compile(r"recomputed \d+ layer halves: (?P<hidden>\d+) inside windows, (?P<late>\d+) on demand")
UNTYPICAL = 3
"""First iterations: memory is being allocated, kernels are being chosen."""


@dataclass(frozen=True)
class Run:
    """What one run printed."""

    setting: str
    text: str

    @property
    def step_s(self) -> float | None:
        """None where it did not come so far."""
        steps = [max(float(line["ms"]), 0.1) / 1000 for line in ITERATION.finditer(self.text) if int(line["number"]) > UNTYPICAL]
        return median(steps) if steps else None

    @property
    def losses(self) -> tuple[tuple[str, str, str], ...]:
        """(iteration, loss, gradient norm), as printed."""
        return tuple((line["number"], line["loss"], line["norm"]) for line in ITERATION.finditer(self.text))

    @property
    def memory_gib(self) -> float | None:
        """The largest figure of any rank. None where there is none, as on a CPU."""
        return max((float(line["mib"]) / 1024 for line in MEMORY.finditer(self.text)), default=0.0) or None

    @property
    def recomputations(self) -> str:
        found = RECOMPUTATIONS.search(self.text)
        return "" if found is None else f"{found['hidden']} / {found['late']}"

    @property
    def ended(self) -> str:
        """Why there are no steps."""
        if "OutOfMemoryError" in self.text:
            return "out of memory"
        return f"no step after the first {UNTYPICAL}" if self.losses else "failed"


def main() -> int:
    options = asked()
    runs = list(logs_of(options.logs) if options.logs else sweep(options))
    print("\n".join(table(runs)))
    return 1 if any(run.step_s is None and run.ended != "out of memory" for run in runs) else 0


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launch", nargs="?", type=Path, help="one of the launches here, or your own that reads SETTING")
    parser.add_argument("arguments", nargs="*", help="behind --: added to Megatron's arguments")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/sweep"), help="a folder for the logs")
    parser.add_argument("--logs", nargs="+", metavar="SETTING=LOG", help="read these instead of running anything")
    options = parser.parse_args()
    if (options.launch is None) == (options.logs is None):
        parser.error("needed a launch, or --logs, one of the two")
    if options.launch is not None and not options.launch.is_file():
        parser.error(f"{options.launch}: found no such file, needed a launch, such as scripts/launches/llama3_8b.sh")
    problems = [problem for pair in options.logs or () for problem in unreadable(pair)]
    if problems:
        parser.error("; ".join(problems))
    if options.iterations <= UNTYPICAL:
        parser.error(f"--iterations: found {options.iterations}, needed more than {UNTYPICAL}: the first ones are not counted")
    if options.launch is not None:
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output: found {options.output} ({error.strerror}), needed a folder that can be written")
    return options


def unreadable(pair: str) -> Iterator[str]:
    """What is wrong with a SETTING=LOG."""
    setting, equals, path = pair.partition("=")
    if not (setting and equals and path):
        yield f"--logs: found {pair!r}, needed SETTING=LOG, such as none=none.log"
    elif not Path(path).is_file():
        yield f"--logs: found no file {path}, needed what the run under {setting} printed"


def sweep(options: argparse.Namespace) -> Iterator[Run]:
    """Run the launch under one setting after another."""
    for setting in options.settings:
        path = options.output / f"{setting}.log"
        print(f"{setting}: {path}", file=sys.stderr)
        environment = {**os.environ, "SETTING": setting, "TRAIN_ITERS": str(options.iterations)}
        with path.open("wb") as file:
            command = ["bash", str(options.launch), *options.arguments]
            subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
        yield Run(setting, path.read_text(errors="replace"))


def logs_of(pairs: Sequence[str]) -> Iterator[Run]:
    for pair in pairs:
        setting, _, path = pair.partition("=")
        yield Run(setting, Path(path).read_text(errors="replace"))


def compared(run: Run, first: Run) -> str:
    """Compares the iterations that both runs have: one run may have ended early."""
    own, others = ({line[0]: line for line in each.losses} for each in (run, first))
    common = own.keys() & others.keys()
    if not common or any(own[number] != others[number] for number in common):
        return "differ"
    most = max(len(own), len(others))
    return "equal" if len(common) == most else f"equal in {len(common)} of {most}"


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Markdown, a row for each run."""
    yield "| setting | step | ratio | memory | losses | recomputations: in windows / on demand |"
    yield "|---|--:|--:|--:|---|--:|"
    first = next((run for run in runs if run.step_s is not None), None)
    for run in runs:
        if first is None or first.step_s is None or run.step_s is None:
            yield f"| {run.setting} | {run.ended} | | | | |"
            continue
        memory = "-" if run.memory_gib is None else f"{run.memory_gib:.1f} GiB"
        losses = "-" if run is first else compared(run, first)
        times = f"{run.step_s:.3f} s | {run.step_s / first.step_s:.3f}"
        yield f"| {run.setting} | {times} | {memory} | {losses} | {run.recomputations} |"


if __name__ == "__main__":
    sys.exit(main())
