"""Records a half under observation (`--lynx-check frames`): an observer compares saved tensors with what backward gets.

forward     saved tensor ──> handle, or offloaded tensor ────┐ [1] the observer sees the tensor
                                                             │
backward    recomputed or reloaded tensor <── requested ─────┘ [2] the observer sees it before a node uses it

forward     an input is gathered that will be gathered again ─────────[3] the observer sees the gathered input
backward    waits for the gather that serves its weight gradient ─────[4] the observer sees that one before its use
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
"""Called with the tensor that backward gets, at each request."""


Again = Literal["replayed", "reloaded", "gathered"]
"""How backward gets the tensor."""


@dataclass(frozen=True)
class Place:
    """Where in a half a tensor was saved."""

    item: str | None
    """None before the first item."""
    segment: int
    ordinal: int
    again: Again


class Observer(Protocol):
    def wants(self, frame: Frame, offloads: bool) -> bool:
        """Return whether to observe this call of a half. `offloads`: whether some tensors may go to the host."""

    def saved(self, frame: Frame, place: Place, tensor: Tensor) -> Returned:
        """Report a saved or gathered tensor. Returns the callback for backward."""


def recorder_for(observer: Observer | None, frame: Frame, random: RandomSource, *others: Any) -> Recorder:
    """Make the recorder of one call, a watched one if the observer wants that.

    `others`: further arguments of `Recorder`, the group first.
    """
    if observer is not None and observer.wants(frame, others[0] is not None):
        return WatchedRecorder(observer, frame, random, *others)
    return Recorder(frame, random, *others)


@dataclass(frozen=True, eq=False)
class _Observed:
    """What autograd stores for an observed tensor."""

    packed: Handle | OffloadedTensor
    returned: Returned

    def tensor(self) -> Tensor:
        tensor = self.packed.tensor()
        self.returned(tensor)  # [2]
        return tensor


class WatchedRecorder(Recorder):
    """A recorder that reports to an observer."""

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
