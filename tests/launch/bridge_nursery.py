"""A process that has imported Megatron-Bridge, and forks ranks: importing it takes a core half a minute.

    python -m tests.launch.bridge_nursery     reads a request a line, as JSON, until none comes; answers each by a status
    {"words": [...], "environment": {...}, "ranks": 2, "said": FILE}     `words`: `-m MODULE` or a script, with its arguments

A rank finds the environment that torchrun gives it. What all of them say goes into the file. When one fails the others are ended;
and all, where they take too long.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

AHEAD = (
    "megatron.bridge.training.pretrain",
    "megatron.bridge.training.gpt_step",
    "megatron_lynx.launch.script",
    "megatron_lynx.apply",
)
TO_SAY_WHY_S = 5.0
"""How long other ranks may go on when one has failed."""
LONGEST_S = 400.0


def main() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from tests.instruments.mamba import stand_in_for_mamba
    from tests.instruments.script_device import stand_in_for_gpu_machine

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed while importing is no answer
    stand_in_for_gpu_machine()
    stand_in_for_mamba()
    for module in AHEAD:
        import_module(module)
    for line in sys.stdin:
        print(exit_status_of(json.loads(line)), file=answers, flush=True)


def exit_status_of(request: dict[str, Any]) -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    names = {
        "WORLD_SIZE": request["ranks"],
        "LOCAL_WORLD_SIZE": request["ranks"],
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    running: set[int] = set()
    for rank in range(request["ranks"]):
        if (pid := os.fork()) == 0:
            become({**request["environment"], **names, "RANK": rank, "LOCAL_RANK": rank}, request["words"], request["said"])
        running.add(pid)
    worst, ends_s = 0, time.monotonic() + LONGEST_S
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            if (failed := abs(os.waitstatus_to_exitcode(status))) and not worst:
                ends_s = min(ends_s, time.monotonic() + TO_SAY_WHY_S)
            worst = max(worst, failed)
            continue
        if time.monotonic() > ends_s:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return worst


def become(environment: dict[str, Any], words: list[str], said: str) -> NoReturn:
    """This process is a rank. It ends here."""
    os.environ.update({name: str(value) for name, value in environment.items()})
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True) for number in (1, 2))
    status: Any = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:  # noqa: BLE001  told as Python tells it
        sys.excepthook(*sys.exc_info())
        status = 1
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    main()
