"""Ranks of a job as fresh processes on this machine, and functions run on all of them.

    parent                                      rank process (one per rank; own core)
      start all ──── environment, pipe ───────>   dies with its parent; pins itself, imports torch, installs the stand-in
                <─── rank 0's rendezvous port ─   (rank 0 keeps torch's store open, so no port is guessed)
      run(f, x) ──── pickled f, x ────────────>   f(rank, x)
                <─── pickled result or error ──
      close     ──── kill ────────────────────>   gone

The first error any rank reports is raised in the parent; the others, which may be waiting for it, are killed.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any

from megatron_lynx.testbed.links import Links

START_S = 120.0
"""Seconds that a rank may take to import torch and megatron-core."""


MEGATRON_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""No compilation, unless a pool of ranks is given a compiler (decided when megatron-core is imported); one thread, so sums are
always in one order; the number of connections that Megatron's sequence parallelism asks for."""


class RankError(RuntimeError):
    """A function failed on a rank. The message is the rank's traceback; the cause is its exception, if it can be pickled."""

    def __init__(self, rank: int, text: str, *, lost: bool = False) -> None:
        self.rank = rank
        self.text = text
        self.lost = lost
        """Whether the rank's process ended without an answer: it was killed, or crashed."""
        super().__init__(f"rank {rank}: {text}")


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    links: Links | None = None,
    pin: bool = True,
    timeout_s: float = 300.0,
    env: Mapping[str, str] | None = None,
    compiler: str | None = None,
) -> list[Any]:
    """`function(rank, *args)` on `ranks` fresh processes; their results in order of rank. See `RankPool`."""
    with RankPool(ranks, links=links, pin=pin, env=env, compiler=compiler) as pool:
        return pool.run(function, *args, timeout_s=timeout_s)


class RankPool:
    """Ranks that stay alive to run several functions, one after another.

    They are started by the first `run`, and again by the first one after a failure. They die with the thread that started
    them, so run from one that lives on.

    Args:
        ranks: how many processes.
        links: the network between them; none is this machine's loopback.
        pin: give every rank a core of its own, if there are enough.
        env: environment variables of the ranks, besides the parent's and those that torchrun would set.
        compiler: what `torch.compile` is in these ranks (`compiler.Backend`), so that Megatron's fusions are compiled.
    """

    def __init__(
        self,
        ranks: int,
        *,
        links: Links | None = None,
        pin: bool = True,
        env: Mapping[str, str] | None = None,
        compiler: str | None = None,
    ) -> None:
        self.ranks = ranks
        self.links = Links() if links is None else links
        cores = sorted(os.sched_getaffinity(0))
        self._cores = cores[:ranks] if pin and ranks <= len(cores) else []
        self._env = dict(env or {}) | ({"LYNX_COMPILER": compiler} if compiler else {})
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._port = 0
        self._runs = 0

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """`function(rank, *args)` on every rank; the results in order of rank.

        The function must be importable by name and leave `torch.distributed` as it likes: the next run finds it as it
        was left. Arguments and results are pickled; tensors may be among them.

        Raises:
            RankError: the first error of a rank. All ranks are killed.
            TimeoutError: no answer within `timeout_s`. All ranks are killed.
        """
        if function.__module__ == "__main__":
            raise ValueError(f"{function.__qualname__} is defined in __main__, which ranks cannot import; move it to a module")
        try:
            if not self._processes:
                self._start()
            self._runs += 1
            self._send_all((self._port, self._runs, function, args))
            return self._collect(timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all ranks and wait until they are gone."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            kill_group(process)
        for process in self._processes:
            process.wait()
        self._processes, self._pipes = [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        for rank in range(self.ranks):
            ours, theirs = Pipe()
            with theirs:
                self._pipes.append(ours)
                self._processes.append(self.process(rank, theirs.fileno()))
        self._port = self._collect(START_S)[0]

    def process(self, rank: int, pipe: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_lynx.testbed.rank_process"],
            env=self.environment(rank, pipe),
            pass_fds=[pipe],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def environment(self, rank: int, pipe: int) -> dict[str, str]:
        core = {"LYNX_CORE": str(self._cores[rank])} if self._cores else {}
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LYNX_PIPE": str(pipe),
            "LYNX_PARENT": str(os.getpid()),
            **core,
            **MEGATRON_ENVIRONMENT,
            **self.links.environment(rank),
            **self._env,
        }

    def _send_all(self, message: tuple[Any, ...]) -> None:
        packed = pickle.dumps(message)
        for pipe in self._pipes:
            pipe.send_bytes(packed)

    def _collect(self, timeout_s: float) -> list[Any]:
        """One answer of every rank, or the first error."""
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        while len(answers) < self.ranks:
            silent = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer from ranks {sorted(silent.values())} within {timeout_s:.0f} s")
            for pipe in ready:
                rank = silent[pipe]  # type: ignore[index]
                answers[rank] = self._answer(rank, pipe)  # type: ignore[arg-type]
        return [answers[rank] for rank in range(self.ranks)]

    def _answer(self, rank: int, pipe: Connection) -> Any:
        try:
            result, error, text = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            status = self._processes[rank].wait()
            raise RankError(rank, f"ended without an answer (exit status {status})", lost=True) from None
        if text is not None:
            raise RankError(rank, text) from error
        return result


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
