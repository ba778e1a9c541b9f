"""Recording a half under observation: somebody is told what each saved tensor was, and what backward gets in its place.

    forward     saved tensor ──> handle (it will be replayed, or reloaded) ──┐ [1] the observer sees the tensor
                                                                             │
    backward    what a replay or a reload made of it <── asks ───────────────┘ [2] the observer sees that, before a node uses it

    forward     an input is gathered that will be gathered again ─────────────[3] the observer sees the whole
    backward    waits for the gather that serves its weight gradient ─────────[4] the observer sees that, before it is used

The observer sees what autograd gets, so it sees whatever went wrong between record and use: another dropout mask, a reload that
was not waited for, memory that was used again too early (rule R10). Without an observer none of this exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from megatron_lynx.runtime.frame import Frame, Handle
from megatron_lynx.runtime.offload import OffloadedTensor
from megatron_lynx.runtime.record import Recorder
from megatron_lynx.runtime.recorded_graph import Replaced
from megatron_lynx.runtime.surroundings import RandomSource

Returned = Callable[[Tensor], None]
"""Called with what backward gets instead of a saved tensor, each time it asks."""


Again = Literal["replayed", "reloaded", "gathered"]
"""A replay makes a tensor again; it comes back from the host; ranks gather it again."""


@dataclass(frozen=True)
class Place:
    """Where in a half a tensor was saved."""

    item: str | None
    """The item that saved it; None before the first one."""
    segment: int
    ordinal: int
    again: Again
    """How it comes to be there again."""


class Observer(Protocol):
    """Who wants to see what becomes of saved tensors."""

    def wants(self, frame: Frame, offloads: bool) -> bool:
        """Whether to observe this call of a half, which is about to be recorded. `offloads`: some of it may go to the host."""

    def saved(self, frame: Frame, place: Place, tensor: Tensor) -> Returned:
        """A tensor was saved, or gathered, that will not stay as it is."""


def recorder_for(observer: Observer | None, frame: Frame, random: RandomSource, *others: Any) -> Recorder:
    """The recorder of one call: a plain one, or one that tells the observer.

    `others`: what else a recorder is given, the group first.
    """
    if observer is not None and observer.wants(frame, others[0] is not None):
        return WatchedRecorder(observer, frame, random, *others)
    return Recorder(frame, random, *others)


@dataclass(frozen=True, eq=False)
class _Observed:
    """What autograd holds of a tensor that is observed, and whom to tell what became of it."""

    packed: Handle | OffloadedTensor
    returned: Returned

    def tensor(self) -> Tensor:
        tensor = self.packed.tensor()
        self.returned(tensor)  # [2]
        return tensor


class WatchedRecorder(Recorder):
    """Records one call of one half, and tells an observer."""

    def __init__(self, observer: Observer, frame: Frame, *others: Any) -> None:
        super().__init__(frame, *others)
        self._observer = observer
        self._items: dict[int, str] = {}
        self._hosted = 0

    def keep_gathered(self, whole: Tensor) -> None:
        if self._item == self.frame.policy.gather_site and self._item is not None:
            self.frame.told = self._observer.saved(self.frame, Place(self._item, self._segment, -1, "gathered"), whole)  # [3] [4]

    def _hooks_for(self, one: Replaced) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        pack, unpack = super()._hooks_for(one)
        return lambda tensor: self._observed(pack(tensor), tensor), unpack

    def _pack(self, tensor: Tensor) -> Any:
        return self._observed(super()._pack(tensor), tensor)

    def _enter(self, item: str | None = None) -> None:
        super()._enter(item)
        if item is not None:
            self._items[self._segment] = item

    def _observed(self, packed: Any, tensor: Tensor) -> Any:
        if isinstance(packed, Handle):
            segment, ordinal = packed.key
        elif isinstance(packed, OffloadedTensor):
            segment, ordinal = self._segment, self._hosted
            self._hosted += 1
        else:
            return packed  # it stays
        place = Place(
            self._items.get(segment), segment, ordinal, "reloaded" if isinstance(packed, OffloadedTensor) else "replayed"
        )
        return _Observed(packed, self._observer.saved(self.frame, place, tensor))  # [1]
