"""Measures this machine's host time and writes it as a file that clusters name (`host_time: hosts/NAME`).

    python -m scripts.measure_host_time configs/hosts/amd-epyc.yaml [--rounds 9] [--steps 3] [--note TEXT]      minutes

Two ranks on this machine's CPU, tiny tensors, Megatron's local layers: what Python, PyTorch's dispatch, Megatron and a plan need
for one layer and micro-batch (`megatron_lynx.testbed.host_time`). It is processor time, and the least of many steps; another
process on the same core still makes it longer, by caches and clock: an idle machine is better, and `--note` says what it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_lynx.anatomy import HALVES
from megatron_lynx.testbed.host_time import Asked, measured_here
from megatron_lynx.whole_file import write_whole
from megatron_lynx.yaml_file import FlowMapping, write_yaml

HEADER = """\
# Host time: microseconds of the CPU to issue one half of a layer, for one micro-batch, under each setting (config/host_time.py).
# Measured by `python -m scripts.measure_host_time {path}`, which writes this file anew.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each setting")
    parser.add_argument("--steps", type=int, default=3, help="steps in each turn")
    parser.add_argument("--note", help="what is to be known about the machine")
    options = parser.parse_args()
    asked = Asked(gathered=True, offloaded=True, rounds=options.rounds, steps=options.steps)
    measured = measured_here(asked, ranks=2).model_dump(mode="json")
    measured["made_by"] += f"; {options.note}" if options.note else ""
    for half in HALVES:
        measured[half] = {setting: FlowMapping(passes) for setting, passes in measured[half].items()}
    write_whole(options.output, HEADER.format(path=options.output) + write_yaml(measured))
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
