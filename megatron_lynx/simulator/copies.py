"""Copies of offloaded activations between a device and its host: two streams, one per direction, overlapped with passes.

    compute      F k ├──────┤ F k+1 ├─────┤ ...  ├──── B n ────┤├──── B n+1 ────┤
    to the host             └── k ──┘            │
    back                                         └── n+1 ──┘

A blocking exchange ends in a device synchronisation (Megatron's `batch_p2p_sync`), which waits for all copies issued before it.
Copies that avoid messages start with the pass after the exchange, and the exchange waits until both streams are free.

A micro-batch whose backward follows its forward at once is offloaded only within its own passes (`ComingBack`; Yuan et al., ATC
'24). Copies do not slow messages down and do not share a link with another device; a caller may pass longer copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_lynx.schedule.schedule import Action


@dataclass(frozen=True)
class HostCopy:
    """Offloaded bytes of one micro-batch of one chunk, and seconds of the copy in each direction."""

    out_s: float
    back_s: float
    bytes: int
    avoids_messages: bool = False


class Copied(NamedTuple):
    """One copy with its times. `action` is the forward that it follows, or the backward that needs it."""

    action: Action
    start_s: float
    end_s: float
    bytes: int

    @property
    def memory(self) -> tuple[float, int]:
        """(time, change in device bytes): freed when an offload ends, allocated when a reload starts."""
        return (self.end_s, -self.bytes) if self.action.kind == "F" else (self.start_s, self.bytes)


class HostCopies:
    """Copies of one stage, in the order in which its passes issue them."""

    def __init__(self) -> None:
        self.done: list[Copied] = []
        self._out_free_s = self._back_free_s = 0.0
        self._out_end_s: dict[tuple[int, int], float] = {}
        self._back_end_s: dict[tuple[int, int], float] = {}
        self._ready: list[tuple[Action, HostCopy]] = []

    @property
    def free_s(self) -> float:
        """Time at which all issued copies are complete."""
        return max(self._out_free_s, self._back_free_s)

    def offload_later(self, forward: Action, copy: HostCopy) -> None:
        """Queue the copy of a finished forward; it starts with the next pass, after the message."""
        self._ready.append((forward, copy))

    def pass_begins(self, time_s: float) -> None:
        for forward, copy in self._ready:
            self.offload(forward, time_s, copy)
        self._ready.clear()

    def offload(self, forward: Action, time_s: float, copy: HostCopy) -> None:
        start_s = max(time_s, self._out_free_s)
        self._out_free_s = start_s + copy.out_s
        self._out_end_s[forward.micro_batch, forward.chunk] = self._out_free_s
        self.done.append(Copied(forward, start_s, self._out_free_s, copy.bytes))

    def reload(self, backward: Action, time_s: float, copy: HostCopy | None) -> None:
        """Issue the copy back for a backward, at `time_s` at the earliest. Does nothing if there is no copy or it was already
        issued."""
        place = backward.micro_batch, backward.chunk
        out_end_s = self._out_end_s.pop(place, None)
        if out_end_s is None or copy is None:
            return
        start_s = max(time_s, out_end_s, self._back_free_s)  # after its own copy out
        self._back_free_s = self._back_end_s[place] = start_s + copy.back_s
        self.done.append(Copied(backward, start_s, self._back_free_s, copy.bytes))

    def back_s(self, backward: Action) -> float:
        """Time at which the backward's copy is complete; 0 if nothing was offloaded. A later time than the pass's start is
        exposed."""
        return self._back_end_s.pop((backward.micro_batch, backward.chunk), 0.0)
