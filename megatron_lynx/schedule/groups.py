"""Groups of micro-batches: those that pass one chunk of an interleaved stage before its next chunk has its turn.

pipeline 2, groups of 3     5 micro-batches  [0 1 2] [3 4]   the last group is smaller, and still has one for each stage
                            4 micro-batches  [0 1 2] [3]     Megatron refuses: the last group does not fill the pipeline
                            2 micro-batches  [0 1]           refused, too: no group is full
"""

from __future__ import annotations


def come_in_groups(microbatches: int, group: int, pipeline: int) -> bool:
    """Whether Megatron runs them: full groups, and a last one that is no smaller than the pipeline."""
    return microbatches >= group and not 0 < microbatches % group < pipeline


def groups_needed(microbatches: int, group: int, pipeline: int, prefix: str = "") -> str | None:
    """What the number of micro-batches must be, in words; None where it is right. `prefix`: of the keys in the file at fault."""
    if come_in_groups(microbatches, group, pipeline):
        return None
    if group == pipeline:
        return f"a multiple of {prefix}pipeline ({pipeline})"
    return f"in groups of {prefix}microbatch_group ({group}), the last of at least {prefix}pipeline ({pipeline}),"
