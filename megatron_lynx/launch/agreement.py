"""One rank's mistake stops all of them, with one message.

    rank 0   ok           ─┐                 ┌─ says: rank 1: plan.yaml: found no such file ...  ─┐ barrier ┌─ exit 2
    rank 1   no such file ─┴── all gather ───┴─                                                   ─┴─────────┴─ exit 2

Without it the ranks that go on would wait in their next collective for the one that stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from megatron_lynx.apply.all_ranks import of_all_ranks
from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.message import say

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
