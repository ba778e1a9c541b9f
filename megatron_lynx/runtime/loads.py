"""Whether a micro-batch's rows still fit into what a plan holds for: if not, a half of experts falls back.

    router ─> counts of all ranks are gathered, as Megatron does it ─┬─> [1] how many rows every rank's experts will get
                                                                     └─> dispatch, experts, ...
              held by halves in flight  +  these rows  >  what the plan holds for, on any rank?
                    no    the half keeps what its rule keeps                                        [2]
                    yes   it keeps nothing of the rows; where backward enters it, tokens travel again   [3]

[1] the counts lie on the device; they follow Megatron's own to the host, which waits for those before it sends tokens
[2] what is held is counted for each rank of the group, so all of them know it of all
[3] a checkpoint communicates: every rank decides alike, because it decides about all of them from the same numbers

Rows of halves are added up whose rules replay the same, because what a row leaves behind is the same then. There is room for as
many as the plan's load gives all halves that were ever held at once: a half that gets more than its share uses what another left.

Where ranks do not learn of each other's rows (DeepEP, HybridEP, overlapped exchanges) each decides for itself, when its experts
begin, and only what needs no communication runs again: the rows stay, and the experts' first linears and activation run again.
So that they fit in any case, a half falls back as soon as halves in flight hold more than the plan's load on average; what is
left of those that did counts in full. With `w` of a row's bytes left, this holds up to `1 / w` times the load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from megatron_lynx.runtime.device import Event
from megatron_lynx.runtime.frame import Frame, HeldRows, MicroBatch, RowsOf


@dataclass(frozen=True)
class Rows:
    """How many rows the experts of every rank will get, on their way to the host; or of this rank alone."""

    counts: Tensor
    """By rank. To be read behind `arrived`."""
    arrived: Event | None
    """None: they are on the host."""
    balanced: float
    """How many each would get if all experts were asked as often."""

    def read(self) -> Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.counts


class Loads:
    """What one engine knows of the rows that its stage's halves hold, on every rank of the group."""

    def __init__(self) -> None:
        self._most: dict[RowsOf, int] = {}
        """How many halves with the same rule were held at once."""

    def too_many(self, frame: Frame, rows: Rows, in_flight: Iterable[MicroBatch], *, whole: bool) -> bool:
        """Whether these rows of a half that is recorded are more than there is room for. `in_flight`: other micro-batches.
        `whole`: by the plan this one keeps everything."""
        policy, own = frame.policy, frame.micro_batch
        assert policy.beyond is not None, f"{policy.name} never falls back"
        rule, counts = (policy.beyond.rule, whole), rows.read()
        held = [each.rows[rule] for each in (*in_flight, own) if rule in each.rows]
        together, now = policy.beyond.together, 1 + sum(each.halves for each in held)
        most = self._most[rule] = max(self._most.get(rule, 0), now)
        all_counts = sum((each.counts for each in held), start=counts)
        beyond = bool((all_counts > policy.beyond.hold * rows.balanced * (most if together else now)).any())
        mine = own.rows.setdefault(rule, HeldRows())
        mine.halves += 1
        mine.counts = mine.counts if beyond and together else mine.counts + counts
        return beyond
