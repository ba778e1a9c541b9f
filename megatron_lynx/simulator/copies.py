"""The copies of offloaded activations between one device and its host: two streams, one each way, beside the passes.

    compute      F k ├──────┤ F k+1 ├─────┤ ...  ├──── B n ────┤├──── B n+1 ────┤
    to the host             └── k ──┘ [1]        │
    back                                         └── n+1 ──┘ [2]       [3]

 [1] what a forward saved is copied when it is over and the stream is free; the originals are let go when the copy is complete
 [2] a backward's copy comes back while the one before it runs (prefetch distance one), after its own way out is complete
 [3] a backward that finds its copy incomplete waits: the copy is exposed

 [4] copies that avoid messages: [1] waits for the pass behind the exchange, and an exchange until both streams are free
 [5] a blocking exchange ends in a synchronisation of the device (Megatron's `batch_p2p_sync`), which waits for all copies that
     were asked for before it: those that do not avoid messages, and are longer than the exchange, are exposed

A micro-batch whose backward follows its forward at once is not offloaded so (Yuan et al., ATC '24), but within its own passes, if
at all; any may be, where the plan says so (`half_copies`). Copies do not slow messages down here, and do not share a link with
another device; a caller that knows better gives longer copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.schedule.schedule import Action


@dataclass(frozen=True)
class HostCopy:
    """What one micro-batch of one chunk offloads: seconds each way, bytes."""

    out_s: float
    back_s: float
    bytes: int
    avoids_messages: bool = False


@dataclass(frozen=True)
class Copied:
    """One copy in its place. `action`: the forward it follows, or the backward it is for."""

    action: Action
    start_s: float
    end_s: float
    bytes: int

    @property
    def memory(self) -> tuple[float, int]:
        """When, and by how much, the device's memory changes: let go at the end of a way out, taken at the start of one back."""
        return (self.end_s, -self.bytes) if self.action.kind == "F" else (self.start_s, self.bytes)


class HostCopies:
    """The copies of one stage, in the order in which its passes ask for them."""

    def __init__(self) -> None:
        self.done: list[Copied] = []
        self._out_free_s = self._back_free_s = 0.0
        self._out_end_s: dict[tuple[int, int], float] = {}
        self._back_end_s: dict[tuple[int, int], float] = {}
        self._ready: list[tuple[Action, HostCopy]] = []

    @property
    def free_s(self) -> float:
        """The time at which nothing that was asked for is under way any more."""
        return max(self._out_free_s, self._back_free_s)

    def offload_later(self, forward: Action, copy: HostCopy) -> None:
        """The forward is over, and its message comes first."""  # [4]
        self._ready.append((forward, copy))

    def pass_begins(self, time_s: float) -> None:
        for forward, copy in self._ready:
            self.offload(forward, time_s, copy)
        self._ready.clear()

    def offload(self, forward: Action, time_s: float, copy: HostCopy) -> None:
        """The forward is over at `time_s`."""
        start_s = max(time_s, self._out_free_s)  # [1]
        self._out_free_s = start_s + copy.out_s
        self._out_end_s[forward.micro_batch, forward.chunk] = self._out_free_s
        self.done.append(Copied(forward, start_s, self._out_free_s, copy.bytes))

    def reload(self, backward: Action, time_s: float, copy: HostCopy | None) -> None:
        """What the backward needs may come back from `time_s` on. Nothing where it was not offloaded, or was asked for before."""
        place = backward.micro_batch, backward.chunk
        out_end_s = self._out_end_s.pop(place, None)
        if out_end_s is None or copy is None:
            return
        start_s = max(time_s, out_end_s, self._back_free_s)  # [2]
        self._back_free_s = self._back_end_s[place] = start_s + copy.back_s
        self.done.append(Copied(backward, start_s, self._back_free_s, copy.bytes))

    def back_s(self, backward: Action) -> float:
        """The time at which the backward has what it needs; 0 for what was not offloaded."""
        return self._back_end_s.pop((backward.micro_batch, backward.chunk), 0.0)
