"""Micro-batches of each chunk of a stage that are in flight, or whose offloaded tensors are on the host, at once.

stage 0 of 4    F0  F1  F2 | F3  B0 ...       1F1B: a set leaves after its forward, and returns a backward before its own, or
on the host      1   2   3 |  3               after the forward before that. The host of stage s holds p-1-s sets.
                              (F3 left, F0 is back)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from operator import ge

from megatron_lynx.schedule.flushes import passes_of
from megatron_lynx.schedule.schedule import Action, Phase

REPEATING_GROUPS = 4
"""Groups of micro-batches of an interleaved step after which counts repeat until the last one."""


def most_in_flight(passes: Iterable[tuple[Action, Phase]]) -> Counter[int]:
    """Return by chunk the most micro-batches between the begin of their forward and the end of their backward."""
    counts, peaks = Counter[int](), Counter[int]()
    for action, _ in passes:
        counts[action.chunk] += {"F": 1, "B": -1}.get(action.kind, 0)
        peaks[action.chunk] = max(peaks[action.chunk], counts[action.chunk])
    return peaks


@lru_cache(maxsize=1024)
def counts_at_backwards(
    pipeline: int, stage: int, microbatches: int, chunks: int = 1, group: int | None = None
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return for each chunk how many micro-batches of every chunk are in flight when one of its backwards begins, including its
    own; only the maximal counts.

    Warm-up takes at most two groups (`flushes.warmup`), after which counts repeat, so the first groups and the last one
    suffice.
    """
    group = group or pipeline
    if chunks > 1:
        microbatches = group * min(microbatches // group, REPEATING_GROUPS) + microbatches % group
    counts, counts_by_chunk = [0] * chunks, [set[tuple[int, ...]]() for _ in range(chunks)]
    for action, _ in passes_of(pipeline, stage, microbatches, chunks, group):
        if action.kind == "B":
            counts_by_chunk[action.chunk].add(tuple(counts))
        counts[action.chunk] += 1 if action.kind == "F" else -1
    return tuple(
        tuple(one for one in some if not any(other != one and all(map(ge, other, one)) for other in some))
        for some in counts_by_chunk
    )


@lru_cache(maxsize=1024)
def sets_on_host(pipeline: int, stage: int, microbatches: int, chunks: int = 1, group: int | None = None) -> tuple[int, ...]:
    """Return `most_on_host` in a step of Megatron's schedules."""
    peaks = most_on_host(passes_of(pipeline, stage, microbatches, chunks, group))
    return tuple(peaks[chunk] for chunk in range(chunks))


def most_on_host(passes: Iterable[tuple[Action, Phase]]) -> Counter[int]:
    """Return by chunk the most micro-batches on the host, without those whose backward follows their forward."""
    order = [*passes]
    backwards = [action for action, _ in order if action.kind == "B"]
    behind = {one: after for (one, _), (after, _) in pairwise(order) if (one.kind, after.kind) == ("F", "B")}
    away: set[Action] = set()
    counts, peaks, begun = Counter[int](), Counter[int](), 0
    for action, phase in order:
        backward = Action(action.micro_batch, "B", action.chunk)
        at_once = behind.get(action) == backward
        begun += action.kind == "B"
        back = {action}
        if action.kind == "B" or (phase == "steady" and action in behind and not at_once):
            back.update(backwards[begun : begun + 1])
        counts.subtract(one.chunk for one in back & away)
        away -= back
        if action.kind == "F" and not at_once:
            away.add(backward)
            counts[action.chunk] += 1
            peaks[action.chunk] = max(peaks[action.chunk], counts[action.chunk])
    return peaks
