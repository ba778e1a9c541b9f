"""Decides whether a half of experts falls back: a micro-batch's rows exceed the plan's bytes.

    router ─> dispatch ─> [1] rows of this rank's experts ─> experts, combine, ...
              rows of halves in flight  +  these rows  >  the plan's?
                    no    the half follows its rule
                    yes   the rows are kept; the experts' first linears and activation are recomputed    [2]

[1] the number of rows is the shape of the dispatched tensor, so the host does not wait
[2] this does not communicate, so each rank decides for itself

Rows are added up over halves with the same rule, because their rows have the same bytes. A half falls back if halves in flight
exceed the plan's load on average; rows of those that fell back count in full. If a fallen-back half keeps the share `w` of a
row's
bytes, this bounds the load at `1 / w` times the plan's (`Predicted.moe_load_fallen_back`).
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_lynx.runtime.frame import Frame, HeldRows, MicroBatch


def too_many(frame: Frame, rows: int, balanced: int, in_flight: Iterable[MicroBatch], *, whole: bool) -> bool:
    """Return whether a half's rows exceed the plan's, and count them as held.

    Args:
        frame: of the half.
        rows: rows of its experts on this rank.
        balanced: rows under uniform routing.
        in_flight: the other micro-batches between forward and backward.
        whole: whether the plan keeps everything of this micro-batch.
    """
    policy, own = frame.policy, frame.micro_batch
    assert policy.beyond is not None, f"{policy.name} never falls back"
    rule = (policy.beyond.rule, whole)
    held = [each.rows[rule] for each in (*in_flight, own) if rule in each.rows]
    halves, all_rows = 1 + sum(each.halves for each in held), rows + sum(each.rows for each in held)
    mine = own.rows.setdefault(rule, HeldRows())
    mine.halves, mine.rows = mine.halves + 1, mine.rows + rows
    return all_rows > policy.beyond.hold * balanced * halves
