"""`python -m scripts.gpu_check`; use `scripts/gpu_check.sh`, which sets the environment that CUDA and Megatron want."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from megatron_lynx.errors import ConfigError, LynxError, Problem
from scripts.gpu_check.machine import Machine, found
from scripts.gpu_check.page import failed, write_page
from scripts.gpu_check.part import Part
from scripts.gpu_check.parts import parts
from scripts.gpu_check.running import LIMIT_S, run_part


def main(arguments: Sequence[str] | None = None, of: Callable[[Machine], list[Part]] = parts) -> int:
    """0 where every part that could run passed; 1 where one failed, each of which is named; 2 where the run cannot begin."""
    given = _read(arguments)
    try:
        machine = found(dry=given.dry_run, gpus=given.gpus)
        chosen = _chosen(of(machine), given.parts)
    except LynxError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    results = []
    for part in chosen:
        print(f"{part.name} ... ", end="", flush=True)
        results.append(run_part(part, machine, given.limit))
        print(f"{results[-1].status} ({results[-1].seconds:.0f} s) {results[-1].reason}", flush=True)
    folder = given.out or _folder(machine)
    print(f"\n{write_page(machine, results, folder)}\nwritten to {folder}")
    for result in failed(results):
        print(f"gpu_check: {result.part.name} failed: {result.reason}", file=sys.stderr)
    return 1 if failed(results) else 0


def _chosen(there: list[Part], names: str | None) -> list[Part]:
    if names is None:
        return there
    wanted = [name.strip() for name in names.split(";")]
    if missing := [name for name in wanted if name not in {part.name for part in there}]:
        listed = "; ".join(part.name for part in there)
        raise ConfigError("the acceptance run cannot begin", [Problem("--parts", name, f"some of: {listed}") for name in missing])
    return [part for part in there if part.name in wanted]


def _folder(machine: Machine) -> Path:
    if "OUT" in os.environ:
        return Path(os.environ["OUT"])
    if machine.dry:
        return Path(f"build/gpu-dry-run-{date.today()}")
    return Path(f"benchmarks/results/gpu-{machine.devices[0].replace(' ', '-').lower()}-x{machine.gpus}-{date.today()}")


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description="What GPUs can show of megatron-lynx.")
    parser.add_argument("--gpus", type=int, help="1, 2, 4 or 8; by default as many of these as there are")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on CPU ranks (2, or as --gpus says); measures nothing")
    parser.add_argument("--parts", metavar="NAMES", help="only these, by name, with ; between")
    parser.add_argument("--limit", metavar="S", type=float, default=LIMIT_S, help="seconds for each part, by default %(default)g")
    parser.add_argument("--out", type=Path, help="folder for the results; by default $OUT, else one in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
