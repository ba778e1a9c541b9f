"""Measures this machine's host time and writes it as a file that clusters name (`host_time: hosts/NAME`).

    python -m scripts.measure_host_time configs/hosts/amd-epyc.yaml [--layers local] [--rounds 9] [--steps 3] [--note TEXT]

What Python, PyTorch's dispatch, Megatron and a plan need for one layer and micro-batch, with tiny tensors, on one rank
(`megatron_lynx.testbed.host_time`): of Megatron's local layers, and of Transformer Engine's where it is on the import path. Where
its compiled part is missing, as without a GPU, the tests' stand-in runs in its place, and `made_by` says so. It takes
minutes. Figures are processor time, and the least of many steps; another process on the same core still makes them longer, by
caches and clock: an idle machine is better, and `--note` says what it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_lynx.anatomy import HALVES
from megatron_lynx.config.cluster import LAYERS, HostTime, Implementation, LayerHostTime
from megatron_lynx.measure.measurement import Links, this_machine
from megatron_lynx.testbed.cpu_device import TRANSFORMER_ENGINE
from megatron_lynx.testbed.fusions import compiles
from megatron_lynx.testbed.host_time import job_of, measure_alone
from megatron_lynx.testbed.ranks import LONGEST_RUN_S, run_ranks
from megatron_lynx.whole_file import write_whole
from megatron_lynx.yaml_file import FlowMapping, read_yaml, write_yaml
from tests import instruments

HEADER = """\
# Host time: microseconds of the CPU to issue one half of a layer, for one micro-batch, under each setting (config/cluster.py).
# Measured by `python -m scripts.measure_host_time {path}`, which writes this file anew.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", choices=[*LAYERS], help="only these (default: all that can be imported)")
    parser.add_argument("--rounds", type=int, default=27, help="turns of each setting: many, as machines have slow phases")
    parser.add_argument("--steps", type=int, default=1, help="steps in each turn")
    parser.add_argument("--note", help="what is to be known about the machine")
    options = parser.parse_args()
    instruments.offer()
    here: list[Implementation] = ["local", *(["transformer_engine"] if find_spec(TRANSFORMER_ENGINE) else [])]  # type: ignore[list-item]
    kinds = [kind for kind in here if options.layers in (None, kind)]
    measured = measured_here(kinds, options.rounds, options.steps).model_dump(mode="json", exclude_none=True)
    measured |= _kept(options.output)
    for kind in kinds:
        measured[kind] = _as_lines(measured[kind], options.note)
    write_whole(options.output, HEADER.format(path=options.output) + write_yaml(measured))
    print(f"wrote {options.output}")


def measured_here(kinds: Iterable[Implementation], rounds: int, steps: int = 1) -> HostTime:
    """Measure this machine's host time, each implementation on a fresh rank. Raises `RankError` with a rank's error."""
    layers: dict[str, LayerHostTime] = {}
    for kind in kinds:
        compiled = compiles(job_of(kind))
        settings = {"pin": not compiled, "timeout_s": LONGEST_RUN_S, "compiled": compiled}
        [layers[kind]] = run_ranks(measure_alone, 1, kind, rounds, steps, **settings)
    return HostTime(cpu=this_machine(Links(kind="none")).cpu, **layers)


def _kept(path: Path) -> dict[str, Any]:
    """What the file has that is not measured here: figures for which all ranks of a node, or experts, are needed."""
    known = read_yaml(path) if path.exists() else {}
    return {name: known[name] for name in ("counts_us", "experts", "adam") if name in known}


def _as_lines(layer: dict[str, Any], note: str | None) -> dict[str, object]:
    """One setting a line."""
    made_by = layer["made_by"] + (f"; {note}" if note else "")
    halves: dict[str, object] = {
        half: {setting: FlowMapping(passes) for setting, passes in layer[half].items()} for half in HALVES
    }
    return {"made_by": made_by} | halves


if __name__ == "__main__":
    main()
