"""Interleaved 1F1B: each stage owns v chunks, and runs them in groups of g micro-batches.

    forwards, p = 2, v = 2, g = 3, m = 5     micro-batch  0 1 2 0 1 2 | 3 4 3 4          backwards have the same order,
    (equal on every stage)                   chunk        0 0 0 1 1 1 | 0 0 1 1          with chunks counted from the last

    stage s:   w = 2 (p - 1 - s) + (v - 1) g  forwards | pairs of a forward and a backward | the remaining backwards

If w is not less than m·v, all forwards run first. With g = p at most w + 1 = v p + p - 1 chunk-forwards are in flight on the
first stage.

The forward before a steady backward is w entries later in the same table, so it is usually of another chunk:

    stage 0 of 2     2F0 0B1   3F0 1B1   2F1 0B0   3F1 1B0          chunk 0 hides recomputations of chunk 1, and vice versa
    last stage       0F1 0B1   1F1 1B1   2F0 0B0   3F0 1B0          the last chunk's backward follows its forward at once

In cool-down the last chunk's backwards wait for a forward of later stages; those of the other chunks follow one another.

Groups of micro-batches pass one chunk of a stage before the next one:

pipeline 2, groups of 3     5 micro-batches  [0 1 2] [3 4]   the last group is smaller, and still has one for each stage
                            4 micro-batches  [0 1 2] [3]     Megatron refuses: the last group does not fill the pipeline
                            2 micro-batches  [0 1]           refused, too: no group is full
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.schedule.one_f_one_b import one_f_one_b
from megatron_lynx.schedule.schedule import Action, Schedule, paired


def come_in_groups(microbatches: int, group: int, pipeline: int) -> bool:
    """Return whether Megatron runs this number: full groups, and a last one that is no smaller than the pipeline."""
    return microbatches >= group and not 0 < microbatches % group < pipeline


def groups_needed(microbatches: int, group: int, pipeline: int, prefix: str = "") -> str | None:
    """Return in words the number of micro-batches that is needed; None if it is right. `prefix`: of the file's keys."""
    if come_in_groups(microbatches, group, pipeline):
        return None
    if group == pipeline:
        return f"a multiple of {prefix}pipeline ({pipeline})"
    return f"in groups of {prefix}microbatch_group ({group}), the last of at least {prefix}pipeline ({pipeline}),"


def warmup(pipeline: int, stage: int, chunks: int, group_size: int) -> int:
    """Return the chunk-forwards of a stage before its first backward, given enough of them."""
    return 2 * (pipeline - 1 - stage) + (chunks - 1) * group_size


def cooldown(pipeline: int, stage: int, microbatches: int, chunks: int, group_size: int) -> tuple[int, ...]:
    """Return by chunk how many backwards follow another backward: those in the last w entries of the table."""
    left = min(warmup(pipeline, stage, chunks, group_size), microbatches * chunks)
    counts, last = [0] * chunks, microbatches % group_size or group_size
    for size in chain([last], repeat(group_size)):
        for chunk in range(chunks):
            taken = min(size, left)
            counts[chunk], left = counts[chunk] + taken, left - taken
        if not left:
            break
    return tuple(counts)


def goes_back_at_once(pipeline: int, stage: int, microbatches: int, chunk: int, chunks: int, group_size: int) -> bool:
    """Return whether each forward of a chunk is followed by its backward: on the last stage the last chunk's, in full groups."""
    return (stage, chunk) == (pipeline - 1, chunks - 1) and microbatches % group_size == 0


def places(microbatches: int, chunks: int, group_size: int) -> Iterator[tuple[int, int]]:
    """Yield (micro-batch, chunk) of all forwards, in order. The last group may be smaller."""
    for first in range(0, microbatches, group_size):
        for chunk in range(chunks):
            for micro_batch in range(first, min(first + group_size, microbatches)):
                yield micro_batch, chunk


def order(
    pipeline: int, stage: int, microbatches: int, chunks: int, group_size: int | None = None, more: int = 0
) -> tuple[Action, ...]:
    """Return the passes of one stage in one step. `group_size`: Megatron's `microbatch_group_size_per_vp_stage`, usually p.
    `more`: additional forwards before the first backward.

    Raises `ConfigError` as Megatron refuses: a group smaller than the pipeline or larger than the step, or a last group that is
    smaller than the pipeline; a pipeline of one stage, or stages of one chunk.
    """
    group = pipeline if group_size is None else group_size
    if problems := list(_problems(pipeline, microbatches, chunks, group)):
        raise ConfigError("no interleaved schedule runs like this", problems)
    table = list(places(microbatches, chunks, group))
    forwards = [Action(micro_batch, "F", chunk) for micro_batch, chunk in table]
    backwards = [Action(micro_batch, "B", chunks - 1 - chunk) for micro_batch, chunk in table]
    return paired(forwards, backwards, warmup(pipeline, stage, chunks, group) + more)


def interleaved(pipeline: int, microbatches: int, chunks: int, group_size: int | None = None, more: int = 0) -> Schedule:
    """Return the orders of all stages. Raises as `order`."""
    group = pipeline if group_size is None else group_size
    stages = range(pipeline)
    return Schedule(
        orders=tuple(order(pipeline, stage, microbatches, chunks, group, more) for stage in stages),
        warmups=tuple(warmup(pipeline, stage, chunks, group) + more for stage in stages),
        chunks=chunks,
        blocking=False,
    )


def with_flushes(pipeline: int, microbatches: int, chunks: int, group: int, more: int = 0) -> Schedule:
    """Return Megatron's schedule with flushes.

    `more`: additional warm-up forwards; the combined schedule has one, so that the two passes of a pair are independent.
    """
    if chunks == 1:
        return one_f_one_b(pipeline, microbatches, more)
    return interleaved(pipeline, microbatches, chunks, group, more)


def _problems(pipeline: int, microbatches: int, chunks: int, group: int) -> Iterator[Problem]:
    if pipeline < 2:
        yield Problem("parallel.pipeline", str(pipeline), "at least 2", "one stage has nothing to interleave with")
    if chunks < 2:
        yield Problem("chunks of a stage", str(chunks), "at least 2", "use plain 1F1B for one")
    if not pipeline <= group <= microbatches:
        yield Problem("microbatch_group_size_per_vp_stage", str(group), f"{pipeline} (stages) to {microbatches} (micro-batches)")
    elif not come_in_groups(microbatches, group, pipeline):
        left = microbatches % group
        needed = f"none, or at least {pipeline}, one for each stage"
        yield Problem("micro-batches of the last group", f"{left} ({microbatches} in groups of {group})", needed)
