"""Runs one part in processes of its own, with a time limit.

start ranks ──> all answer in time       passed, or failed: what is wrong, and on which ranks
          ├──> a rank raises             failed: its error; the others, which may wait for it, are ended
          └──> one gives no answer       failed: it hangs; all are ended, and the next part finds free devices
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from megatron_lynx.testbed.ranks import RankError, RankPool
from scripts.gpu_check.machine import Machine
from scripts.gpu_check.part import Answer, Part, Result

LIMIT_S = 300.0
"""Seconds that a part may take, if nobody says otherwise."""


def run_part(part: Part, machine: Machine, limit_s: float = LIMIT_S) -> Result:
    if part.ranks > machine.gpus:
        return Result(part, "skipped", f"needs {part.ranks} GPUs, this run has {machine.gpus}")
    if (reason := part.lacking(machine)) is not None:
        return Result(part, "skipped", reason)
    begin_s = time.perf_counter()
    try:
        with RankPool(part.ranks, pin=machine.dry, env=part.env) as pool:
            answers = pool.run(part.function, *part.given, timeout_s=limit_s)
    except TimeoutError as error:
        return Result(part, "failed", f"hangs: {error}", time.perf_counter() - begin_s)
    except RankError as error:
        said = [line for line in error.text.strip().splitlines() if line.strip()][-1].strip()
        return Result(part, "failed", f"rank {error.rank}: {said}", time.perf_counter() - begin_s)
    return judged(part, answers, time.perf_counter() - begin_s)


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
