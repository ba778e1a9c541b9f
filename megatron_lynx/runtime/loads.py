"""Decides whether a micro-batch's rows still fit into the bytes of a plan: if not, a half of experts falls back.

    router ─> dispatch ─> [1] so many rows came to this rank's experts ─> experts, combine, ...
              held by halves in flight  +  these rows  >  what the plan holds for?
                    no    the half keeps what its rule keeps
                    yes   the rows stay; the experts' first linears and activation run again    [2]

[1] the number of rows is the shape of what the dispatch returned, so the host waits for nothing
[2] this communicates nothing, so each rank decides for itself

Rows are added up over halves whose rules replay the same, because a row then leaves the same bytes. A half falls back as soon as
halves in flight hold more than the plan's load on average; the rows of those that fell back count in full. With `w` of a row's
bytes left, this bounds the load at `1 / w` times the plan's (`Predicted.moe_load_fallen_back`).
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_lynx.runtime.frame import Frame, HeldRows, MicroBatch


def too_many(frame: Frame, rows: int, balanced: int, in_flight: Iterable[MicroBatch], *, whole: bool) -> bool:
    """Whether these rows of a half that is recorded are more than there is room for; counts them as held.

    Args:
        frame: of the half.
        rows: how many its experts get on this rank.
        balanced: how many they would get if all experts were asked as often.
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
