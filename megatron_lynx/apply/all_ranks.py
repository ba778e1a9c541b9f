"""What all ranks of a run say, gathered: over whatever group there is, or alone where there is none."""

from __future__ import annotations

from typing import TypeVar

from torch import distributed

Value = TypeVar("Value")


def of_all_ranks(mine: Value) -> list[Value]:
    """What each rank gave, in the order of ranks. Every rank must call this; NCCL carries it on this rank's device."""
    if not distributed.is_initialized() or distributed.get_backend() == "fake":  # the others of that one do not exist
        return [mine]
    gathered = [mine] * distributed.get_world_size()
    distributed.all_gather_object(gathered, mine)
    return gathered
