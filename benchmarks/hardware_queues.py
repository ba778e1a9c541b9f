"""What holds up compute while a long kernel, or a copy, runs on another stream: by CUDA_DEVICE_MAX_CONNECTIONS, on a real GPU.

    python -m benchmarks.hardware_queues [--connections 1 8] [--out FOLDER]

    side stream   [ long ............ ][ what follows it ]
    compute       [ its own work ............ ]              issued behind both

With one connection all streams share a hardware queue. `hidden` is the share of the shorter of the two that ran beside the other:
(long + compute - both together) / the shorter of them. 1: what follows is no hindrance. 0: it stands at the queue's head until
the long one is over, and everything behind it waits. Megatron asks for one connection with tensor or sequence parallelism.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch

from benchmarks.results_folder import results_folder
from scripts.gpu_check.copies import least_s

CYCLES = 20_000_000
"""Of a long kernel: about 10 ms."""
COPIED_BYTES = 2**29
ROUNDS = 4
HERE = "benchmarks.hardware_queues"

Work = Callable[[], object]


def main() -> int:
    options = _asked()
    if options.measure:
        print(json.dumps(measured()))
        return 0
    if not torch.cuda.is_available():
        print("hardware_queues: found no GPU that torch can use, needed one", file=sys.stderr)
        return 2
    found = {number: _in_a_process(number) for number in options.connections}
    text = page(torch.cuda.get_device_name(0), found)
    print(text)
    if options.out is not None:
        (options.out / "hardware-queues.md").write_text(text)
    return 0


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", nargs="+", type=int, default=[1, 8], help="values of CUDA_DEVICE_MAX_CONNECTIONS")
    parser.add_argument("--out", type=results_folder, help="a folder for the page")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_a_process(connections: int) -> dict[str, dict[str, float]]:
    """The variable is read when CUDA starts."""
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
    command = [sys.executable, "-m", HERE, "--measure"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(run.stdout)
    return found


def measured() -> dict[str, dict[str, float]]:
    """The hidden share, by what is long and by what follows it."""
    side, third, compute = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()
    few = torch.ones(64, device="cuda")
    here = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    there = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)

    def on(stream: torch.cuda.Stream, work: Work) -> None:
        with torch.cuda.stream(stream):
            work()

    def event(*, timed: bool) -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=timed)
        made.record(side)
        return made

    def elsewhere() -> None:
        third.wait_event(event(timed=False))
        on(third, lambda: few.add_(1))

    long: dict[str, Work] = {
        "a kernel": lambda: on(side, lambda: torch.cuda._sleep(CYCLES)),
        "a copy to the host": lambda: on(side, lambda: there.copy_(here, non_blocking=True)),
        "a copy to the device": lambda: on(side, lambda: here.copy_(there, non_blocking=True)),
    }
    behind: dict[str, Work] = {
        "nothing": lambda: None,
        "an event": lambda: event(timed=False),
        "an event that takes the time": lambda: event(timed=True),
        "a wait of a third stream": lambda: third.wait_event(event(timed=False)),
        "a kernel of its stream": lambda: on(side, lambda: few.add_(1)),
        "a kernel of a third stream, which waits": elsewhere,
    }
    own_s = _seconds(lambda: torch.cuda._sleep(CYCLES))
    found: dict[str, dict[str, float]] = {}
    for name, work in long.items():
        work_s = _seconds(work)
        found[name] = {}
        for follows, what in behind.items():

            def together(work: Work = work, what: Work = what) -> None:
                side.wait_stream(compute)
                work()
                what()
                torch.cuda._sleep(CYCLES)

            found[name][follows] = (work_s + own_s - _seconds(together)) / min(work_s, own_s)
    return found


def _seconds(work: Work) -> float:
    return least_s(work, torch.device("cuda"), ROUNDS)


def page(device: str, found: dict[int, dict[str, dict[str, float]]]) -> str:
    """Markdown."""
    lines = [f"Share hidden, {device}, torch {torch.__version__}, by CUDA_DEVICE_MAX_CONNECTIONS:", ""]
    lines += ["| long | behind it | " + " | ".join(map(str, found)) + " |", "|---|---|" + "--:|" * len(found)]
    for name, rows in next(iter(found.values())).items():
        for follows in rows:
            figures = " | ".join(f"{of[name][follows]:.2f}" for of in found.values())
            lines.append(f"| {name} | {follows} | {figures} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
