"""The command: chooses the parts, runs one after another, and keeps the results on the disk, whatever happens to the run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from itertools import count
from pathlib import Path

from megatron_lynx.errors import ConfigError, LynxError, Problem
from scripts.gpu_check.machine import CANNOT_BEGIN, Machine, found
from scripts.gpu_check.page import failed, write_page
from scripts.gpu_check.part import Part, Result
from scripts.gpu_check.parts import parts
from scripts.gpu_check.running import LIMIT_S, Running, lacking
from tests import instruments

INTERRUPTED = 130
"""The exit status of a run that somebody interrupts, as shells have it."""


def main(arguments: Sequence[str] | None = None, of: Callable[[Machine], list[Part]] = parts) -> int:
    """0 where every part that could run passed; 1 where one failed, each of which is named; 2 where the run cannot begin."""
    given = _read(arguments)
    if given.dry_run:
        instruments.offer()
    try:
        machine = found(dry=given.dry_run, gpus=given.gpus, ranks=given.ranks)
        chosen = _chosen(of(machine), given, machine)
        folder = given.out or _folder(machine)
        write_page(machine, _not_run(chosen), folder)  # nobody wants to know in the end that it cannot be written
    except LynxError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    results = list[Result]()
    try:
        for result in _run(chosen, machine, given):
            results.append(result)
            write_page(machine, [*results, *_not_run(chosen[len(results) :])], folder)
    except KeyboardInterrupt:
        print(f"\ngpu_check: interrupted; {len(results)} of {len(chosen)} parts are in {folder}", file=sys.stderr)
        return INTERRUPTED
    except LynxError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\n{write_page(machine, results, folder)}\nwritten to {folder}")
    for result in failed(results):
        print(f"gpu_check: {result.part.name} failed: {result.reason}", file=sys.stderr)
    return 1 if failed(results) else 0


def _run(chosen: list[Part], machine: Machine, given: argparse.Namespace) -> Iterator[Result]:
    with Running(machine, given.limit, fresh=given.fresh) as running:
        for part in chosen:
            print(f"{part.name} ... ", end="", flush=True)
            result = running.run(part)
            print(f"{result.status} ({result.seconds:.0f} s) {result.reason}", flush=True)
            if result.details:
                print(result.details, file=sys.stderr, flush=True)
            yield result


def _not_run(left: list[Part]) -> list[Result]:
    return [Result(part, "not run", "the run ended before it") for part in left]


def _chosen(there: list[Part], given: argparse.Namespace, machine: Machine) -> list[Part]:
    """The parts that are asked for. Raises `ConfigError` where there are no such parts, or none that can run."""
    if not 0 < given.limit < float("inf"):
        raise ConfigError(CANNOT_BEGIN, [Problem("--limit", f"{given.limit:g}", "a number of seconds above 0")])
    if given.parts is None:
        return there
    wanted = [name.strip() for name in given.parts.split(";") if name.strip()]
    missing = [name for name in wanted if name not in {part.name for part in there}]
    if missing or not wanted:
        listed = "; ".join(part.name for part in there)
        raise ConfigError(CANNOT_BEGIN, [Problem("--parts", name, f"some of: {listed}") for name in missing or ["no name"]])
    chosen = [part for part in there if part.name in wanted]
    reasons = {part.name: lacking(part, machine) for part in chosen}
    if None not in reasons.values():
        problems = [Problem("--parts", f"{name}, which {reason}", "a part that can run") for name, reason in reasons.items()]
        raise ConfigError(CANNOT_BEGIN, problems)
    return chosen


def _folder(machine: Machine) -> Path:
    """Where results go if nobody says: no earlier run's are there."""
    if "OUT" in os.environ:
        return Path(os.environ["OUT"])
    if machine.dry:
        folder = f"build/gpu-dry-run-{date.today()}"
    else:
        shared = f"-shared-by-{machine.ranks}" if machine.shared_by(machine.ranks) else ""
        name = machine.devices[0].replace(" ", "-").lower()
        folder = f"benchmarks/results/gpu-{name}-x{machine.gpus}{shared}-{date.today()}"
    names = (Path(folder if number == 1 else f"{folder}-{number}") for number in count(1))
    return next(name for name in names if not name.exists())


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description="What GPUs can show of megatron-lynx.")
    parser.add_argument("--gpus", type=int, help="1, 2, 4 or 8; by default as many of these as there are")
    parser.add_argument("--ranks", type=int, help="1, 2, 4 or 8: more than there are GPUs share them; by default one for each")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on CPU ranks (2, or as --gpus says); measures nothing")
    parser.add_argument("--parts", metavar="NAMES", help="only these, by name, with ; between")
    parser.add_argument("--limit", metavar="S", type=float, default=LIMIT_S, help="seconds for each part, by default %(default)g")
    parser.add_argument("--fresh", action="store_true", help="each part in processes of its own; slower")
    parser.add_argument("--out", type=Path, help="folder for the results; by default $OUT, else a new one in benchmarks/results")
    return parser.parse_args(arguments)
