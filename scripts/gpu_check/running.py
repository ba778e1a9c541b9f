"""Runs parts one after another on ranks that stay, each part with a time limit.

start ranks ──> all answer in time       passed, or failed: what is wrong, and on which ranks. If nothing failed, the next part of
          │                              as many ranks with the same environment runs in the same processes
          ├──> a rank raises             failed: its error; the others, which may wait for it, are ended
          ├──> one gives no answer       failed: it hangs; where each rank is; all are ended, and the next part finds free devices
          └──> what a part wants beside its ranks is refused           skipped

To start ranks, which import torch and begin to use their devices, takes longer than most parts.
"""

from __future__ import annotations

import faulthandler
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_lynx.testbed.ranks import RankError, RankPool
from scripts.gpu_check.machine import Machine
from scripts.gpu_check.mps import Refused
from scripts.gpu_check.part import Answer, Part, Result
from scripts.gpu_check.places import Places

LIMIT_S = 300.0
"""Seconds that a part may take, if nobody says otherwise."""

LATE = 0.9
"""The share of a part's time after which a rank that has no answer yet says where it is."""

AT_LEAST_S = 0.5
"""But not in its first half second."""


def lacking(part: Part, machine: Machine) -> str | None:
    """Why a part cannot run on a machine; None where it can."""
    if part.ranks > machine.ranks and not part.one_gpu:
        what = "ranks" if machine.shared_by(machine.ranks) else "GPUs"
        return f"needs {part.ranks} {what}, this run has {machine.ranks}"
    return part.lacking(machine)


class Running:
    """A run's ranks.

    Args:
        limit_s: seconds that a part may take.
        fresh: each part in processes of its own.
    """

    def __init__(self, machine: Machine, limit_s: float = LIMIT_S, *, fresh: bool = False) -> None:
        self._machine = machine
        self._limit_s = limit_s
        self._fresh = fresh
        self._ranks: _Ranks | None = None
        self._closed: Result | None = None
        """That a part failed which opens others."""

    def run(self, part: Part) -> Result:
        if (reason := self._lacking(part)) is not None:
            return Result(part, "skipped", reason)
        begin_s = time.perf_counter()
        try:
            ranks = self._ranks_for(part)
        except Refused as refused:
            return Result(part, "skipped", str(refused), time.perf_counter() - begin_s)
        result = ranks.run(part, min(self._limit_s, part.limit_s))
        if result.status == "failed" or self._fresh or part.apart:
            self.close()
        if result.status == "failed" and part.opens:
            self._closed = result
        return replace(result, seconds=time.perf_counter() - begin_s)

    def _lacking(self, part: Part) -> str | None:
        if (reason := lacking(part, self._machine)) is not None:
            return reason
        if self._closed is not None and part.ranks >= self._closed.part.ranks:
            return f"{self._closed.part.name}: failed, {self._closed.reason}"
        return None

    def _ranks_for(self, part: Part) -> _Ranks:
        if self._ranks is None or part.apart or not self._ranks.fit(part):
            self.close()
            self._ranks = _Ranks(part, self._machine)
        return self._ranks

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Ranks:
    """Processes for parts that ask for the same."""

    def __init__(self, part: Part, machine: Machine) -> None:
        self._asked = _asked(part)
        with ExitStack() as opening:
            self._folder = Path(opening.enter_context(tempfile.TemporaryDirectory()))
            gpus = 1 if part.one_gpu else machine.gpus
            self._places = Places(self._folder, gpus, part.ranks > gpus)
            env = {**part.env, **(opening.enter_context(part.beside()) if part.beside is not None else {})}
            self._pool = opening.enter_context(RankPool(part.ranks, links=self._places, pin=machine.dry, env=env))
            self._open = opening.pop_all()

    def fit(self, part: Part) -> bool:
        return _asked(part) == self._asked

    def run(self, part: Part, limit_s: float) -> Result:
        try:
            late_at_s = time.time() + LATE * limit_s
            answers = self._pool.run(answer, str(self._folder), late_at_s, part.function, part.given, timeout_s=limit_s)
        except TimeoutError as error:
            result = Result(part, "failed", f"hangs: {error}", details=self._where_ranks_are())
        except RankError as error:
            said = f"rank {error.rank}: {_in_a_line(error)}"
            result = Result(part, "failed", said, details="" if error.lost else error.text)
        else:
            result = judged(part, answers)
        if result.status != "failed":
            return result
        return replace(result, details="\n".join(filter(None, [result.details, self._places.nccl_said()])))

    def close(self) -> None:
        self._open.close()

    def _where_ranks_are(self) -> str:
        """Stacks of the ranks that were late, the innermost call first."""
        said = {file.name: file.read_text().strip() for file in sorted(self._folder.glob("rank *"))}
        return "\n".join(f"{name} is at\n{stacks}" for name, stacks in said.items() if stacks)


def _asked(part: Part) -> tuple[object, ...]:
    """What a part asks of its processes."""
    return part.ranks, dict(part.env), part.beside, part.one_gpu


def answer(rank: int, folder: str, late_at_s: float, function: Callable[..., Answer], given: tuple[Any, ...]) -> Answer:
    """Runs inside `RankPool`. What a part's function answers; if it is late with that, the rank's stacks are in `folder`."""
    _forget_the_last_part()
    with Path(folder, f"rank {rank}").open("w") as file:
        faulthandler.dump_traceback_later(max(AT_LEAST_S, late_at_s - time.time()), file=file)
        try:
            return function(rank, *given)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _forget_the_last_part() -> None:
    """Its models go, and the memory that torch keeps for the next ones."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _in_a_line(error: RankError) -> str:
    cause = error.__cause__
    if cause is None:  # it could not be pickled, or the process is gone
        return [line for line in error.text.strip().splitlines() if line.strip()][-1].strip()
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


def judged(part: Part, answers: Sequence[Answer]) -> Result:
    """Failed where one rank found something wrong."""
    wrong = _with_ranks([answer.wrong for answer in answers])
    notes = _with_ranks([answer.notes for answer in answers])
    return Result(part, "failed" if wrong else "passed", "; ".join(wrong or notes), answers=tuple(answers))


def _with_ranks(said: Sequence[Sequence[str]]) -> list[str]:
    """Each sentence once, with the ranks that say it unless all do."""
    ranks: dict[str, list[int]] = {}
    for rank, sentences in enumerate(said):
        for sentence in sentences:
            ranks.setdefault(sentence, []).append(rank)
    return [
        sentence if len(having) == len(said) else f"rank{'s' * (len(having) > 1)} {', '.join(map(str, having))}: {sentence}"
        for sentence, having in ranks.items()
    ]
