"""Runs functions on all ranks of a job, as fresh processes on this machine.

    parent                                      rank process (one per rank; own core)
      start all ──── environment, pipe ───────>   exits with its parent; pins itself, imports torch, emulates CUDA
      run(f, x) ──── pickled f, x ────────────>   joins the parent's store; f(rank, x)
                <─── pickled result or error ──
      close     ──── kill ────────────────────>   exit

The parent raises the first error of any rank, and kills the others, which may be waiting for it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Literal

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError, LynxError, Problem
from megatron_lynx.measure.measurement import LinkKind
from megatron_lynx.measure.measurement import Links as LinkFacts
from megatron_lynx.testbed.fusions import compiles, fusion_problems
from megatron_lynx.testbed.links import Links

START_S = 120.0
"""Time limit for a rank's import of torch and megatron-core."""


MEGATRON_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Disables compilation (read when megatron-core is imported); one thread keeps the order of sums fixed; Megatron's sequence
parallelism requires one CUDA connection."""


class RankError(RuntimeError):
    """A function failed on a rank. The message is the rank's traceback; the cause is its exception, if it can be pickled."""

    def __init__(self, rank: int, text: str, *, lost: bool = False) -> None:
        self.rank = rank
        self.text = text
        self.lost = lost
        """Whether the process ended without an answer: killed, or crashed."""
        super().__init__(f"rank {rank}: {text}")


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 300.0, **settings: Any) -> list[Any]:
    """Run `function(rank, *args)` in `ranks` fresh processes; return the results by rank. `settings`: of `RankPool`."""
    with RankPool(ranks, **settings) as pool:
        return pool.run(function, *args, timeout_s=timeout_s)


class RankPool(AbstractContextManager["RankPool"]):
    """Ranks that stay alive to run several functions in sequence. They exit with the thread that started them.

    The first `run` starts them, and the first one after a failure restarts them. `links`: None: loopback. `pin`: every rank to
    its own core, if there are enough. `env`: variables besides the parent's and torchrun's. `compiled`: `torch.compile` is on.
    """

    def __init__(
        self,
        ranks: int,
        *,
        links: Links | None = None,
        pin: bool = True,
        env: Mapping[str, str] | None = None,
        compiled: bool = False,
    ) -> None:
        self.ranks = ranks
        self.links = Links() if links is None else links
        cores = sorted(os.sched_getaffinity(0))
        self._cores = cores[:ranks] if pin and ranks <= len(cores) else []
        self._env = ({"TORCHDYNAMO_DISABLE": "0"} if compiled else {}) | dict(env or {})
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._runs = 0

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """Run `function(rank, *args)` on every rank; return the results by rank. Both are pickled; the function is found by name.

        Raises `RankError`, the first error of a rank, or `TimeoutError` without an answer in time; then all are killed. State
        of `torch.distributed` stays as the function leaves it.
        """
        if function.__module__ == "__main__":
            raise ValueError(f"{function.__qualname__} is defined in __main__, which ranks cannot import; move it to a module")
        try:
            if not self._processes:
                self._start()
            self._runs += 1
            packed = pickle.dumps((self._store.port, self._runs, function, args))
            for pipe in self._pipes:
                pipe.send_bytes(packed)
            return self._collect(timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes, self._pipes = [], []

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # so no port is guessed
        for rank in range(self.ranks):
            ours, theirs = Pipe()
            with theirs:
                self._pipes.append(ours)
                self._processes.append(self.process(rank, theirs.fileno()))
        self._collect(START_S)

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

    def _collect(self, timeout_s: float) -> list[Any]:
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


LONGEST_RUN_S = 1800.0


@dataclass(frozen=True)
class Hosts:
    """Where the ranks of a job run.

    job.cluster: device cpu, link 400 Mbit/s   ─>  emulated hosts, shaped links
    job.cluster: device cpu, no link           ─>  loopback
    job.cluster: device cuda                   ─>  this machine's GPUs
    """

    ranks: int
    device: Literal["cpu", "cuda"]
    network: Links
    compiled: bool = False
    """Whether `torch.compile` makes fusions of the job."""

    @property
    def links(self) -> LinkFacts:
        several: LinkKind = "device" if self.device == "cuda" else "loopback" if self.network.rate_mbit is None else "shaped"
        return LinkFacts(kind="none" if self.ranks == 1 else several, mbit_per_s=self.network.rate_mbit)

    @property
    def description(self) -> str:
        return "one rank, no links" if self.ranks == 1 else self.network.description

    def run(self, function: Callable[..., Any], *args: Any, unshaped: bool = False) -> list[Any]:
        """`unshaped` ignores the link's rate. Raises errors of this package as they are, others as `RankError`."""
        network = Links() if unshaped else self.network
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        try:
            with RankPool(self.ranks, links=network, env=hidden, compiled=self.compiled) as pool:
                return pool.run(function, *args, timeout_s=LONGEST_RUN_S)
        except RankError as error:
            if isinstance(error.__cause__, LynxError):
                raise error.__cause__ from None
            if error.lost:
                todo = "was it killed? by the out-of-memory killer, perhaps: `dmesg` would say so"
                raise LynxError("a rank was lost", [Problem(f"rank {error.rank}", error.text, "an answer", todo)]) from None
            raise


def hosts_for(job: Job) -> Hosts:
    """Raises `ConfigError` if this machine cannot run the job."""
    if problems := list(_problems(job)):
        raise ConfigError("this job cannot be run on this machine", problems)
    rate_mbit = job.cluster.link_mbit_per_s if job.cluster.device == "cpu" and job.gpus > 1 else None
    return Hosts(job.gpus, job.cluster.device, Links(rate_mbit), compiles(job))


def _problems(job: Job) -> Iterator[Problem]:
    model, parallel, on_gpus = job.model, job.parallel, job.cluster.device == "cuda"
    if on_gpus and (gpus := torch.cuda.device_count()) < job.gpus:
        yield Problem("job: gpus", f"{job.gpus}", f"at most {gpus}, the GPUs of this machine", "or cluster.device: cpu")
    if not on_gpus and job.gpus > MOST_RANKS_PER_CORE * (cores := len(os.sched_getaffinity(0))):
        needed = f"at most {MOST_RANKS_PER_CORE * cores}, {MOST_RANKS_PER_CORE} for each core of this machine"
        yield Problem("job: gpus", f"{job.gpus} processes", needed)
    if parallel.context > 1 and not (model.uses_te and on_gpus):
        needed = "1: but for Transformer Engine's on GPUs no attention exchanges keys and values"
        yield Problem("job: parallel.context", f"{parallel.context}", needed)
    if model.vocab % parallel.tensor:
        needed = f"a multiple of parallel.tensor ({parallel.tensor})"
        yield Problem("job: model.vocab", f"{model.vocab}", needed, "pad it, as Megatron's training scripts do")
    if model.attention == "flash" and not (model.uses_te and on_gpus):
        todo = "the testbed's local layers keep the scores, and so do all on a CPU"
        yield Problem("job: model.attention", "flash", "unfused", todo)
    yield from fusion_problems(job)


MOST_RANKS_PER_CORE = 4
