"""A schedule whose batches overlap, as an engine has to know it: micro-batches of the next batch run before this one is over.

    whoever runs the schedule          engine
    ------------------------------     ----------------------------------------------------------------------
    a batch begins                     begin_batch(turns, fills)
    forward, backward                  as ever
                                       as_recorded(i): the weights are those of micro-batch i while a replay of it runs

Micro-batches are counted since the pipeline was last filled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megatron_lynx.runtime.engine import Engine
    from megatron_lynx.runtime.turns import Turns


class Overlapping(Protocol):
    """Runs the batches of one stage."""

    def few_batches(self, microbatches: int) -> Turns:
        """What the stage does from filling the pipeline to draining it; as many batches as show everything."""
        ...

    def as_recorded(self, micro_batch: int) -> AbstractContextManager[None]:
        """The parameters are inside what the forward of this micro-batch saw."""
        ...

    def check_drained(self, what: str) -> None:
        """Raises `HookRefused` where micro-batches are in flight."""
        ...

    def under(self, engine: Engine | None) -> None:
        """From now on, tell this engine (or none) when a batch begins."""
        ...
