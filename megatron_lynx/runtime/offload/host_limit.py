"""How much of its host's memory one rank may hold for offloaded activations.

each rank says       what it may take from (`free_memory`), and how large its part of the training state is
all have heard       of each machine and control group: who takes from it
a rank's limit       the least, over all that it takes from, of   (free - reserve) / ranks that take from it

reserve              a tenth of what is free, for page cache and data loaders, or what the ranks' states take, if that is
                     more: an asynchronous checkpoint copies them to the host, and an optimizer on the CPU has them there
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lynx.errors import OffloadError, Problem
from megatron_lynx.free_memory import FreeMemory, Pot
from megatron_lynx.units import format_bytes

RESERVE = 10
"""One of so many parts of what is free is left alone."""


@dataclass(frozen=True)
class HostFacts:
    """What one rank says of its host."""

    free: FreeMemory
    state_bytes: int = 0
    """Weights, master weights and moments that this rank owns."""


@dataclass
class HostLimit:
    """What one rank may hold of its host's memory, all its pools together."""

    most_bytes: int
    held_bytes: int = 0
    words: str = ""
    """Where the limit comes from, for messages."""

    def gives_back(self, size_bytes: int) -> None:
        """So much is not held any more."""
        self.held_bytes -= size_bytes


def limit_of(mine: HostFacts, ranks: Sequence[HostFacts]) -> HostLimit:
    """`ranks`: what each rank of the run says, this one among them."""
    return min((_share(pot, ranks) for pot in mine.free.pots), key=lambda share: share.most_bytes)


def _share(pot: Pot, ranks: Sequence[HostFacts]) -> HostLimit:
    same = [(facts, other) for facts in ranks for other in facts.free.pots if other.identity == pot.identity]
    free_bytes = min(other.free_bytes for _, other in same)  # each has looked at another moment
    reserve_bytes = min(free_bytes, max(free_bytes // RESERVE, sum(facts.state_bytes for facts, _ in same)))
    words = f"{format_bytes(free_bytes)} free of {pot.words}, {format_bytes(reserve_bytes)} of it in reserve"
    words += f", for {len(same)} rank{'s' if len(same) > 1 else ''}"
    return HostLimit((free_bytes - reserve_bytes) // len(same), words=words)


def too_little(where: str, needed_bytes: int, limit: HostLimit) -> OffloadError:
    """The host has too little memory for what a plan offloads."""
    found_bytes, source = limit.most_bytes, f" ({limit.words})" if limit.words else ""
    problem = Problem(
        f"{where}: host memory for offloaded activations",
        f"{found_bytes} bytes ({format_bytes(found_bytes)}) available to this rank{source}",
        f"{needed_bytes} bytes ({format_bytes(needed_bytes)})",
        "lower offload.bytes in the plan, or start fewer ranks on a host",
    )
    return OffloadError("the host has too little memory", [problem])
