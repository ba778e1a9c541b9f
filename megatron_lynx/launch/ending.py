"""One message when a run fails: which rank, how far it was, and why.

    the training loop returns, or exits with 0    `concluded` writes the last figures; Megatron exits with 0 between steps, when
                                                  its time is over or a signal arrived
    the script raises                             Python's traceback, which torch marks with the rank; exit status 1
    the script exits with another status          torchrun reports it
    an error found where all ranks check          `agree`: rank 0 says why, and all ranks exit with one status
    an error on one rank                          `FirstFailure`: that rank says why and exits; torchrun (or
                                                  `srun --kill-on-bad-exit`) ends the others, and ranks that fail because of it
                                                  exit without a message
    a signal, an abort                            Python's stacks of all threads (`faulthandler`)

torchrun exits with status 1 for any status of a rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_lynx.apply.live_run import of_all_ranks
from megatron_lynx.errors import ConfigError, LynxError, Problem
from megatron_lynx.launch.script import say

ENDED = "megatron-lynx/ended"
"""Key in the store of the process group: the number of ranks that failed by themselves."""


class FirstFailure:
    """Finds out which rank failed first; later ones exit without a message. Must be created while all ranks are alive."""

    def __init__(self) -> None:
        self._store: Any = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone() if hasattr(store, "clone") else store  # other threads may be waiting on the first

    def is_first(self) -> bool:
        """Whether this rank, which is about to exit, failed first. False if the rank that hosts the store is gone."""
        if self._store is None:
            return True
        with suppress(RuntimeError):
            return bool(self._store.add(ENDED, 1) == 1)
        return False

    def follow(self, status: int = 1) -> None:
        """Exit if another rank has failed, as that is why this one fails."""
        with suppress(RuntimeError):
            if self._store is not None and self._store.check([ENDED]):
                sys.stdout.flush()
                time.sleep(1)  # torchrun reports the rank that exits first: let that be the failed one
                os._exit(status)


@contextmanager
def concluded(conclude: Callable[[], None], between_steps: Callable[[], bool]) -> Iterator[None]:
    """Call `conclude` if the training loop inside ends normally; it does so on all ranks alike."""
    try:
        yield
    except SystemExit as end:
        if end.code in (None, 0) and between_steps():
            conclude()
        raise
    conclude()


Value = TypeVar("Value")


class Ended(SystemExit):
    """All ranks exit, and rank 0 has printed why."""


def agree(error: LynxError | None, *, same: str | None = None, what: str = "") -> None:
    """Exit on all ranks if one has an error, or if `same` differs between ranks. Collective.

    `what` names the compared value in words. Raises `Ended` on every rank; without a process group, raises `error`.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    gathered = of_all_ranks((error, same))
    errors = [error for error, _ in gathered]
    if any(errors):
        _end(errors)
    values = [value for _, value in gathered]
    if len(set(values)) > 1:
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        problem = Problem(what, f"other contents on rank {other} than on rank 0", "the same file on all ranks")
        _end([ConfigError("the ranks disagree", [problem])] * len(values))


def gathered_on_rank_0(mine: Value) -> list[Value]:
    """Return the values of all ranks, in order, on rank 0, and an empty list elsewhere. Collective."""
    if not dist.is_initialized():
        return [mine]
    gathered = [mine] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(mine, gathered or None)
    return gathered


def _end(errors: Sequence[LynxError | None]) -> None:
    first = next(error for error in errors if error is not None)
    on_rank_0("\n".join([f"megatron-lynx: {first.headline}", *_lines(errors)]))
    with suppress(RuntimeError):
        dist.barrier()
    raise Ended(max(error.exit_status for error in errors if error is not None))


def _lines(errors: Sequence[LynxError | None]) -> list[str]:
    ranks: dict[Problem, list[int]] = {}
    for rank, error in enumerate(errors):
        for problem in error.problems if error is not None else ():
            ranks.setdefault(problem, []).append(rank)
    whose = {1: "rank {}: ", len(errors): ""}
    words = {problem: whose.get(len(having), "ranks {}: ") for problem, having in ranks.items()}
    return [f"  - {words[problem].format(', '.join(map(str, having)))}{problem}" for problem, having in ranks.items()]


def on_rank_0(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        say(text)
