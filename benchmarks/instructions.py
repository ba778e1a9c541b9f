"""Host time of a plan, in instructions: what the processor executes in one step, counted by Valgrind.

    python -m benchmarks.instructions [--te FOLDER] [--json]       needs valgrind and a C compiler; two minutes a kind of layers

On a shared machine seconds of Python differ by a tenth from run to run and by two thirds from hour to hour, instructions by
0.3 %, whatever else runs. They say whether a change made host time shorter, not by how many seconds: memory that is not in a
cache costs more than instructions tell. Layers, settings and weight gradients are those of `testbed.host_time`; a plan that
offloads runs on the first of two stages. What settings share (the model's ends, stock's own layers) is subtracted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.host_time import NORMS_AND_ACTIVATION
from megatron_lynx.config.job import Job
from megatron_lynx.measure.measurement import Links, this_machine
from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.candidates import FULL, NONE, Candidate, offloading_all
from megatron_lynx.testbed.fusions import deferring_job, stand_in_for_fused_gradient
from megatron_lynx.testbed.ranks import MEGATRON_ENVIRONMENT
from tests import instruments
from tests.tiny_jobs import tiny_job

LAYERS, MICROBATCHES, WARMUP = 6, 2, 3

MARKS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""
"""What tells Valgrind from when to when to count."""


@dataclass(frozen=True)
class Row:
    """One setting of one kind of layers: thousands of instructions of one layer and one micro-batch."""

    layers: str
    setting: str
    beyond_none: float
    """What it adds to stock none."""


def settings(kind: str, *, offloading: bool) -> tuple[Job, dict[str, Candidate]]:
    layout: dict[str, Any] = {"pipeline": 2, "replicas": 1} if offloading else {"replicas": 2}
    job = deferring_job(
        tiny_job("llama", layers=LAYERS, microbatches=MICROBATCHES, implementation=kind, attention="unfused", **layout)
    )
    kept = uniform_plan(job, "none")
    if offloading:
        return job, {"none": NONE, "offloads_everything": Candidate("offloads", plan=offloading_all(kept))}
    return job, {
        "none": NONE,
        "full": FULL,
        "keeps_everything": Candidate("kept", plan=kept),
        "norms_and_activation": Candidate("some", plan=uniform_plan(job, NORMS_AND_ACTIVATION)),
        "everything_on_demand": Candidate("all", plan=uniform_plan(job)),
    }


def step_under_valgrind(marks: Path, kind: str, *, offloading: bool) -> None:
    """Runs in a process of its own, which Valgrind watches: one step of each setting counts."""
    import torch

    from megatron_lynx.testbed.comparison import subjects_of

    valgrind = ctypes.CDLL(str(marks))
    torch.set_num_threads(1)
    instruments.stand_in()
    from megatron_lynx.testbed.groups import join_alone  # it imports Megatron, and that Transformer Engine

    join_alone(2)
    job, candidates = settings(kind, offloading=offloading)
    with stand_in_for_fused_gradient():
        subjects = subjects_of(job, list(candidates.values()))
        for name, candidate in candidates.items():
            with subjects[candidate.name].in_force():
                for _ in range(WARMUP):
                    subjects[candidate.name].uncleared_step()
                gc.collect()
                valgrind.begin()
                subjects[candidate.name].uncleared_step()
                valgrind.end(name.encode())


def counted(folder: Path, kind: str, environment: Mapping[str, str], *, offloading: bool) -> dict[str, int]:
    """Instructions of one step, by setting."""
    marks = folder / "marks.so"
    if not marks.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-o", marks, "-x", "c", "-"], input=MARKS, text=True, check=True)
    out = folder / f"{kind}-{offloading}"
    watched = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
    inside = [sys.executable, "-m", "benchmarks.instructions", "--inside", str(marks), kind]
    inside += ["offloading"] if offloading else []
    done = subprocess.run([*watched, *inside], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"the step under Valgrind failed:\n{done.stderr}")
    found = {}
    for file in sorted(folder.glob(f"{out.name}.*")):
        text = file.read_text()
        name, total = re.search(r"Client Request: (\w+)", text), re.search(r"^summary: (\d+)", text, re.MULTILINE)
        if name is not None and total is not None:
            found[name[1]] = int(total[1])
    return found


def rows(te: str | None) -> Iterator[Row]:
    kinds: dict[str, list[str]] = {"local": []} | ({} if te is None else {"transformer_engine": [te]})
    for kind, paths in kinds.items():
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTHONHASHSEED": "0"}
        path = os.pathsep.join([*paths, *(each or os.getcwd() for each in sys.path)])
        environment = {**os.environ, **MEGATRON_ENVIRONMENT, **rank, "PYTHONPATH": path}
        with TemporaryDirectory() as folder:
            for offloading in (False, True):
                found = counted(Path(folder), kind, environment, offloading=offloading)
                calls = MICROBATCHES * LAYERS / (2 if offloading else 1)
                none = found.pop("none")
                for name, instructions in found.items():
                    yield Row(kind, name.replace("_", " "), round((instructions - none) / calls / 1e3, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--te", metavar="FOLDER", help="a Transformer Engine, whose layers run as well")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        marks, kind, *offloading = options.inside
        step_under_valgrind(Path(marks), kind, offloading=bool(offloading))
        return
    missing = [tool for tool in ("valgrind", "cc") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"needs {' and '.join(missing)} on the path (Debian: apt-get install valgrind gcc)")
    instruments.offer()
    found = list(rows(options.te))
    if options.json:
        machine = this_machine(Links(kind="none")).model_dump(mode="json")
        facts = {"date": date.today().isoformat(), "machine": machine}
        print(json.dumps({**facts, "rows": [asdict(row) for row in found]}, indent=2))
        return
    table = Table(title="thousands of instructions of one layer and one micro-batch beyond stock none")
    for column in ("layers", "setting", "instructions"):
        table.add_column(column)
    for row in found:
        table.add_row(row.layers, row.setting, f"{row.beyond_none:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
