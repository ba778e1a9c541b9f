"""What an engine has to know of a schedule whose batches overlap: micro-batches of the next batch run before this one is over.

Such a schedule (`megatron_lynx.double_buffered`) runs the batches instead of Megatron's functions, so it tells the engine where
one begins, and under which weights a replay has to run.

    whoever runs the schedule          engine
    ------------------------------     ----------------------------------------------------------------------
    a batch begins                     begin_batch(order, fills=)
    forward, backward                  as in every other schedule
                                       as_recorded(i): the weights are those of micro-batch i while a replay of it runs

Micro-batches are counted since the pipeline was last filled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from megatron_lynx.runtime.stage_order import StageOrder


class BatchListener(Protocol):
    """An engine, as far as such a schedule calls it."""

    def begin_batch(self, order: StageOrder, *, fills: bool) -> None:
        """A batch begins. `order` starts with its first pass; `fills`: nothing is in flight."""
        ...


class Overlapping(Protocol):
    """Runs the batches of one stage."""

    def few_batches(self, microbatches: int) -> StageOrder:
        """What the stage does from filling the pipeline to draining it; as many batches as show everything."""
        ...

    def as_recorded(self, micro_batch: int) -> AbstractContextManager[None]:
        """Inside, the parameters are what the forward of this micro-batch saw."""
        ...

    def check_drained(self, what: str) -> None:
        """Raises `HookRefused` where micro-batches are in flight."""
        ...

    def under(self, engine: BatchListener | None) -> None:
        """From now on, tell this engine (or none) when a batch begins."""
        ...
