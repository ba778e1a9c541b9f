"""Megatron's schedules with flushes: 1F1B (PipeDream-Flush), interleaved where stages have several chunks.

    1F1B, stage s of p        w = p - 1 - s forwards | pairs of a forward and the oldest backward | the remaining backwards
    interleaved, v chunks     w = 2 (p - 1 - s) + (v - 1) g chunk-forwards | ...

If w is not less than the forwards of a step, all of them run first. At most w + 1 are in flight on a stage.

Interleaved, groups of g micro-batches pass one chunk of a stage before the next one:

    forwards, p = 2, v = 2, g = 3, m = 5     micro-batch  0 1 2 0 1 2 | 3 4 3 4          backwards have the same order,
    (equal on every stage)                   chunk        0 0 0 1 1 1 | 0 0 1 1          with chunks counted from the last

The forward before a steady backward is w entries later in the same table, so it is usually of another chunk:

    stage 0 of 2     2F0 0B1   3F0 1B1   2F1 0B0   3F1 1B0          chunk 0 hides recomputations of chunk 1, and vice versa
    last stage       0F1 0B1   1F1 1B1   2F0 0B0   3F0 1B0          the last chunk's backward follows its forward at once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from operator import ge

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.schedule.schedule import Action, Phase, Schedule, paired, phases_of


def groups_needed(microbatches: int, group: int, pipeline: int, prefix: str = "") -> str | None:
    """Return in words the number of micro-batches that Megatron needs to interleave: full groups, and a last one that fills the
    pipeline; None if it is right. `prefix`: of the file's keys."""
    if microbatches >= group and not 0 < microbatches % group < pipeline:
        return None
    if group == pipeline:
        return f"a multiple of {prefix}pipeline ({pipeline})"
    return f"in groups of {prefix}microbatch_group ({group}), the last of at least {prefix}pipeline ({pipeline}),"


def warmup(pipeline: int, stage: int, chunks: int = 1, group: int | None = None) -> int:
    """Return the chunk-forwards of a stage before its first backward, given enough of them. `group`: Megatron's
    `microbatch_group_size_per_vp_stage`, by default as many micro-batches as stages."""
    ahead = pipeline - 1 - stage
    return ahead if chunks == 1 else 2 * ahead + (chunks - 1) * (group or pipeline)


def goes_back_at_once(pipeline: int, stage: int, microbatches: int, chunk: int, chunks: int, group: int) -> bool:
    """Return whether each forward of a chunk is followed by its backward: on the last stage the last chunk's, in full groups."""
    return (stage, chunk) == (pipeline - 1, chunks - 1) and microbatches % group == 0


def _places(microbatches: int, chunks: int, group: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, chunk) of all forwards."""
    for first in range(0, microbatches, group):
        for chunk in range(chunks):
            for micro_batch in range(first, min(first + group, microbatches)):
                yield micro_batch, chunk


def order(
    pipeline: int, stage: int, microbatches: int, chunks: int = 1, group: int | None = None, more: int = 0
) -> tuple[Action, ...]:
    """Return the passes of one stage in one step.

    `more`: additional forwards before the first backward; the combined schedule has one, so that the two passes of a pair are
    independent.

    Raises `ConfigError` if several chunks do not run with this many micro-batches.
    """
    needed = groups_needed(microbatches, group or pipeline, pipeline) if chunks > 1 else None
    if needed is not None:
        problem = Problem("micro-batches of a pipeline", str(microbatches), needed)
        raise ConfigError("no interleaved schedule runs like this", [problem])
    table = list(_places(microbatches, chunks, group or pipeline))
    forwards = [Action(micro_batch, "F", chunk) for micro_batch, chunk in table]
    backwards = [Action(micro_batch, "B", chunks - 1 - chunk) for micro_batch, chunk in table]
    return paired(forwards, backwards, warmup(pipeline, stage, chunks, group) + more)


def passes_of(
    pipeline: int, stage: int, microbatches: int, chunks: int = 1, group: int | None = None, more: int = 0
) -> Iterator[tuple[Action, Phase]]:
    """Arguments and errors: as `order`."""
    actions = order(pipeline, stage, microbatches, chunks, group, more)
    return phases_of(actions, warmup(pipeline, stage, chunks, group) + more)


@lru_cache(maxsize=16)
def with_flushes(pipeline: int, microbatches: int, chunks: int = 1, group: int | None = None, more: int = 0) -> Schedule:
    """Arguments and errors: as `order`."""
    stages = range(pipeline)
    return Schedule(
        orders=tuple(order(pipeline, stage, microbatches, chunks, group, more) for stage in stages),
        warmups=tuple(warmup(pipeline, stage, chunks, group) + more for stage in stages),
        chunks=chunks,
        blocking=chunks == 1,
    )


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
    peaks = most_on_host(passes_of(pipeline, stage, microbatches, chunks, group))
    return tuple(peaks[chunk] for chunk in range(chunks))


def most_on_host(passes: Iterable[tuple[Action, Phase]]) -> Counter[int]:
    """Return by chunk the most micro-batches on the host, without those whose backward follows their forward.

    stage 0 of 4    F0  F1  F2 | F3  B0 ...       1F1B: a set leaves after its forward, and returns a backward before its own, or
    on the host      1   2   3 |  3               after the forward before that. The host of stage s holds p-1-s sets.
                                  (F3 left, F0 is back)
    """
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
