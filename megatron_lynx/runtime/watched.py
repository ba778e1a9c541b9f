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
from typing import Literal, Protocol

from torch import Tensor

from megatron_lynx.runtime.frame import Frame, Handle
from megatron_lynx.runtime.offload import OffloadedTensor

Returned = Callable[[Tensor], None]
"""Called with the tensor that backward gets, at each request."""


Again = Literal["recomputed", "reloaded", "gathered"]
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


@dataclass(frozen=True, eq=False)
class Observed:
    """What autograd stores for an observed tensor."""

    packed: Handle | OffloadedTensor
    returned: Returned

    def tensor(self) -> Tensor:
        tensor = self.packed.tensor()
        self.returned(tensor)  # [2]
        return tensor
