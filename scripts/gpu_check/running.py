"""Runs one part in processes of its own, with a time limit.

start ranks ──> all answer in time       passed, or failed: what is wrong, and on which ranks
          ├──> a rank raises             failed: its error; the others, which may wait for it, are ended
          └──> one gives no answer       failed: it hangs; where each rank is; all are ended, and the next part finds free devices
"""

from __future__ import annotations

import faulthandler
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_lynx.testbed.ranks import RankError, RankPool
from scripts.gpu_check.machine import Machine
from scripts.gpu_check.part import Answer, Part, Result

LIMIT_S = 300.0
"""Seconds that a part may take, if nobody says otherwise."""

LATE = 0.9
"""The share of a part's time after which a rank that has no answer yet says where it is."""

AT_LEAST_S = 0.5
"""But not in its first half second."""


def lacking(part: Part, machine: Machine) -> str | None:
    """Why a part cannot run on a machine; None where it can."""
    return f"needs {part.ranks} GPUs, this run has {machine.gpus}" if part.ranks > machine.gpus else part.lacking(machine)


def run_part(part: Part, machine: Machine, limit_s: float = LIMIT_S) -> Result:
    if (reason := lacking(part, machine)) is not None:
        return Result(part, "skipped", reason)
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with RankPool(part.ranks, pin=machine.dry, env=part.env) as pool:
                late_at_s = time.time() + LATE * limit_s
                answers = pool.run(answer, folder, late_at_s, part.function, part.given, timeout_s=limit_s)
        except TimeoutError as error:
            return Result(part, "failed", f"hangs: {error}", time.perf_counter() - begin_s, details=_where_ranks_are(folder))
        except RankError as error:
            said = f"rank {error.rank}: {_in_a_line(error)}"
            return Result(part, "failed", said, time.perf_counter() - begin_s, details="" if error.lost else error.text)
    return judged(part, answers, time.perf_counter() - begin_s)


def answer(rank: int, folder: str, late_at_s: float, function: Callable[..., Answer], given: tuple[Any, ...]) -> Answer:
    """Runs inside `RankPool`. What a part's function answers; if it is late with that, the rank's stacks are in `folder`."""
    with Path(folder, f"rank {rank}").open("w") as file:
        faulthandler.dump_traceback_later(max(AT_LEAST_S, late_at_s - time.time()), file=file)
        try:
            return function(rank, *given)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _where_ranks_are(folder: str) -> str:
    """Stacks of the ranks that were late, the innermost call first."""
    said = {file.name: file.read_text().strip() for file in sorted(Path(folder).iterdir())}
    return "\n".join(f"{name} is at\n{stacks}" for name, stacks in said.items() if stacks)


def _in_a_line(error: RankError) -> str:
    cause = error.__cause__
    if cause is None:  # it could not be pickled, or the process is gone
        return [line for line in error.text.strip().splitlines() if line.strip()][-1].strip()
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


def judged(part: Part, answers: Sequence[Answer], seconds: float) -> Result:
    """Failed where one rank found something wrong."""
    wrong = _with_ranks([answer.wrong for answer in answers])
    notes = _with_ranks([answer.notes for answer in answers])
    return Result(part, "failed" if wrong else "passed", "; ".join(wrong or notes), seconds, tuple(answers))


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
