"""Starting a process from the nursery. The first one in a session starts the nursery, too."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_lynx.testbed.ranks import RankPool
from tests.instruments.compiler import COMPILER
from tests.nursery.request import Request, receive_number

ADDRESS = "TESTS_NURSERY"
"""The environment variable that names the socket of the nursery, and its process."""

OF_LAUNCHES = "TESTS_NURSERY_OF_LAUNCHES"
"""The one that names the nursery that has imported the `megatron.training` of a launch."""

ROOT = Path(__file__).parents[2]

PINNED = False
"""Whether ranks have a core of their own, as they have elsewhere. Two sessions of tests side by side would both take the first
core for their first rank, and leave the other one idle."""

AT_BEGIN = dict(os.environ)
"""The environment of this session before any test has changed it. The nursery imports in it what all later processes have."""


class Process:
    """As much of `subprocess.Popen` as those who start ranks use. It leads a process group."""

    def __init__(self, request: Request, files: Sequence[int], nursery: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(nursery)
        request.send(self._socket, files)
        self.pid = receive_number(self._socket)
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            self.returncode = receive_number(self._socket)
            self._socket.close()
        return self.returncode

    def kill(self) -> None:
        """And whatever of its group is there."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


def start(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: int | None = None,
    nursery: str | None = None,
) -> Process:
    """A process that reads nothing. What it says goes into the file `output`, or where this one's goes."""
    return _start(module, arguments, environment, {1: 1, 2: 2} if output is None else {1: output, 2: output}, nursery)


@dataclass(frozen=True)
class Ended:
    """What became of a process, as `subprocess.CompletedProcess` has it."""

    returncode: int
    stdout: str
    stderr: str


def run(module: str, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 120) -> Ended:
    """`python -u -m MODULE ARGUMENTS`, until it ends."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = _start(module, arguments, environment or os.environ, {1: out.fileno(), 2: err.fileno()})
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        return Ended(status, *(said.read() for said in (out, err) if said.seek(0) == 0))


def start_rank(pool: RankPool, rank: int, pipe: int) -> Process | subprocess.Popen[bytes]:
    """In place of `RankPool.process`. Started as ever: ranks with a heap of their own (glibc reads its settings when a process
    starts), and those on machines with a GPU."""
    environment = pool.environment(rank, pipe)
    own_heap = any(name.startswith("MALLOC_") for name in environment.keys() - os.environ.keys())
    if own_heap or Path("/dev/nvidiactl").exists():
        return as_ever(pool, rank, pipe)
    if not PINNED:
        environment.pop("LYNX_CORE", None)
    nursery = address() if COMPILER in environment else with_megatron(environment)
    environment["LYNX_PARENT"] = str(nursery[1])
    return _start("megatron_lynx.testbed.rank_process", [], environment, {1: 1, 2: 2, pipe: pipe}, nursery[0])


def _start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], files: Mapping[int, int], nursery: str | None = None
) -> Process:
    """`files`: open files of this process by the number that they get."""
    nursery = nursery or address()[0]
    with open(os.devnull) as nothing:
        files = {0: nothing.fileno(), **files}
        environment = {**environment, ADDRESS: os.environ[ADDRESS]}
        return Process(Request(module, list(arguments), environment, os.getcwd(), list(files)), list(files.values()), nursery)


OF_ONE_RANK = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LYNX_PIPE", "LYNX_PARENT", "LYNX_LINK", "MASTER_ADDR"),
    *("PYTEST_CURRENT_TEST", ADDRESS, "CUDA_VISIBLE_DEVICES"),
}
"""Variables that are no matter when Megatron is imported, here without a GPU; nor is any of NCCL's. Each rank of a GPU check has
a file for NCCL of its own, and had a nursery of its own."""


def with_megatron(environment: Mapping[str, str], what: str = "megatron") -> tuple[str, int]:
    """The address of a nursery that was started with this environment, and has imported its Megatron; or its `training`."""
    common = (each for each in environment.items() if each[0] not in OF_ONE_RANK and not each[0].startswith("NCCL_"))
    name, process = _with_megatron(tuple(sorted(common)), what)
    return name, process.pid


@cache
def _with_megatron(environment: tuple[tuple[str, str], ...], what: str) -> tuple[str, Process]:
    """It ends with the session: then nobody waits for it any more."""
    name = f"\0lynx-nursery-{os.urandom(8).hex()}"
    with listening(name) as listener:
        file = listener.fileno()
        parent = {"LYNX_PARENT": str(address()[1])}
        process = _start("tests.nursery", [str(file), what], dict(environment) | parent, {1: 1, 2: 2, file: file})
    return name, process


as_ever = RankPool.process


@cache
def begin() -> subprocess.Popen[bytes]:
    """The nursery of this session, which ends with it. Where it is reached goes into the environment."""
    name = f"lynx-nursery-{os.urandom(8).hex()}"
    with listening(f"\0{name}") as listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.nursery", str(listener.fileno())],
            cwd=ROOT,
            env={**AT_BEGIN, "LYNX_PARENT": str(os.getpid())},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
        )
    os.environ[ADDRESS] = f"{name}:{process.pid}"
    return process


def listening(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(64)
    return listener


def address() -> tuple[str, int]:
    """The name of its socket, which has no file, and its process."""
    if ADDRESS not in os.environ:
        begin()
    name, _, pid = os.environ[ADDRESS].partition(":")
    return f"\0{name}", int(pid)
