"""How a run ends on all ranks, with one message that says which rank, how far it was, and why.

    the training loop returns    it ended as it should have: `concluded` writes what is left
      or exits by 0              likewise: Megatron's does, between steps, when its time is over or a signal came
    the script raises            its line, then Python's own traceback; exit status 1
    the script exits, not by 0   its line: `sys.exit` prints nothing
    an error where all meet      `agree`: every rank exits with one status after rank 0 has said why
    an error elsewhere           `LastWord`: the first rank says why and exits; torchrun (or `srun --kill-on-bad-exit`) ends the
                                 others, and those that fail meanwhile because it is gone exit silently
    a signal, an abort           Python's stacks of all threads, also while the interpreter shuts down

torchrun ends with status 1 whatever became of a rank, and prints its report after all that ranks have printed.

    rank 0   ok           ─┐                 ┌─ says: rank 1: plan.yaml: found no such file ...  ─┐ barrier ┌─ exit 2
    rank 1   no such file ─┴── all gather ───┴─                                                   ─┴─────────┴─ exit 2
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_lynx.apply.live_run import of_all_ranks
from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.message import say

ENDED = "megatron-lynx/ended"
"""A key in the store of the process group: how many ranks have failed by themselves."""


class LastWord:
    """Which rank failed first. It says why; ranks that fail after it, because it is gone, exit without a message.

    To be made while all ranks live: it holds a connection of its own to the store, which other threads may be waiting on.
    """

    def __init__(self) -> None:
        self._store: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone() if hasattr(store, "clone") else store

    def is_first(self) -> bool:
        """Whether this rank, which fails and will exit, is the first. It is not where the rank that hosts the store is gone."""
        if self._store is None:
            return True
        with suppress(RuntimeError):
            return bool(self._store.add(ENDED, 1) == 1)
        return False

    def follow(self, status: int = 1) -> None:
        """Exit if another rank failed before: this one fails because of it."""
        with suppress(RuntimeError):
            if self._store is not None and self._store.check([ENDED]):
                sys.stdout.flush()
                time.sleep(1)  # torchrun reports the rank that exits first, and ends all others: its message comes first
                os._exit(status)


@contextmanager
def named_ending(how_far: Callable[[], str]) -> Iterator[None]:
    """Says how what runs inside ended, and lets it end so. `how_far`: where a run was, in words (`in step 3`)."""
    if not faulthandler.is_enabled() and _can_write(sys.stderr):
        faulthandler.enable()  # until the process ends: what aborts it may come when nothing of Python's runs any more
    try:
        yield
    except (Ended, LynxError):
        raise
    except SystemExit as end:
        if end.code not in (None, 0):
            _say(how_far, f"sys.exit({end.code!r})")
        raise
    except BaseException as error:
        first = str(error).partition("\n")[0]
        _say(how_far, f"{type(error).__name__}: {first}" if first else type(error).__name__)
        raise


@contextmanager
def concluded(conclude: Callable[[], None], between_steps: Callable[[], bool]) -> Iterator[None]:
    """Runs `conclude` where the training loop inside ended as it should have, on all ranks alike."""
    try:
        yield
    except SystemExit as end:
        if end.code in (None, 0) and between_steps():
            conclude()
        raise
    conclude()


def _say(how_far: Callable[[], str], cause: str) -> None:
    say(f"megatron-lynx: rank {os.environ.get('RANK', '0')} ended {how_far()}: {cause}")


def _can_write(stream: object) -> bool:
    """Whether it is a file of the system's, as the handler needs."""
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


Value = TypeVar("Value")


@dataclass(frozen=True)
class Report:
    """The problems that one rank found."""

    headline: str
    problems: tuple[Problem, ...]
    exit_status: int


class Ended(SystemExit):
    """All ranks end together, and rank 0 has said why."""


def agree(error: LynxError | None, *, same: str | None = None, what: str = "") -> None:
    """End all ranks if one has an error, or if `same` is not equal on all of them. Every rank must call this.

    `what` says in words what must be the same.
    Raises `SystemExit` on every rank, after rank 0 has said why; without a process group, the error itself.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    mine = Report(error.headline, error.problems, error.exit_status) if error is not None else None
    gathered = of_all_ranks((mine, same))
    reports = [report for report, _ in gathered]
    if any(reports):
        _end(reports)
    values = [value for _, value in gathered]
    if len(set(values)) > 1:
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        problem = Problem(what, f"other contents on rank {other} than on rank 0", "the same file on all ranks")
        _end([Report("the ranks disagree", (problem,), 2)] * len(values))


def gathered_on_rank_0(mine: Value) -> list[Value]:
    """What each rank gave, in the order of ranks, on rank 0; elsewhere nothing. Every rank must call this."""
    if not dist.is_initialized():
        return [mine]
    gathered = [mine] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(mine, gathered or None)
    return gathered


def _end(reports: Sequence[Report | None]) -> None:
    """Rank 0 speaks before anybody goes: torchrun ends all ranks as soon as one is gone."""
    first = next(report for report in reports if report is not None)
    on_rank_0("\n".join([f"megatron-lynx: {first.headline}", *_lines(reports)]))
    with suppress(RuntimeError):  # who has left the barrier may be gone before its last message is out
        dist.barrier()
    raise Ended(max(report.exit_status for report in reports if report is not None))


def _lines(reports: Sequence[Report | None]) -> list[str]:
    """A line for each problem, with the ranks that have it unless all do."""
    ranks: dict[Problem, list[int]] = {}
    for rank, report in enumerate(reports):
        for problem in report.problems if report is not None else ():
            ranks.setdefault(problem, []).append(rank)
    return [f"  - {_whose(having, len(reports))}{problem}" for problem, having in ranks.items()]


def _whose(ranks: Sequence[int], world: int) -> str:
    if len(ranks) == world:
        return ""
    return f"rank {ranks[0]}: " if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}: "


def on_rank_0(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        say(text)
