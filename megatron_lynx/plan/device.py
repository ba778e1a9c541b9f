"""The devices that a plan was made for: how much memory they have, how much of it the plan may use, and what it leaves for whom.

what PyTorch reports = reserve: outside PyTorch (context, libraries, nccl)  +  its allocator's slack  +  what was planned with
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from megatron_lynx.validation import Part

SLACK = "allocator"
"""The part of a reserve that is PyTorch's own: reserved, and not allocated."""
STATED = "stated"
"""A reserve in one piece, of which nobody knows the parts."""


class PlannedDevice(Part):
    """Bytes of one device. What a plan expects to be used of it is each stage's prediction."""

    memory_bytes: int = Field(ge=1)
    """As PyTorch reports it."""
    budget_bytes: int
    """What the plan might use, by what PyTorch allocates: a job's own figure, or what the reserve leaves."""
    reserve_bytes: Mapping[str, Annotated[int, Field(ge=0)]] = {}
    """What the cluster's description leaves alone, by part."""

    @property
    def outside_bytes(self) -> int | None:
        """What is expected to be used by others than PyTorch's allocator; None where that is not known."""
        known = {part: size for part, size in self.reserve_bytes.items() if part not in (SLACK, STATED)}
        return sum(known.values()) if known else None

    @property
    def slack_bytes(self) -> int | None:
        """What the allocator is expected to have reserved and not allocated; None where that is not known."""
        return self.reserve_bytes.get(SLACK)
