"""One forward of one chunk, until its backward is over: which one it is, and what of it was regenerated.

A micro-batch knows nothing of frames and groups. A frame knows the micro-batch that it belongs to, the ledger finds the frames
of one, and the offloader what of one is on the host.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import Tensor

from megatron_lynx.anatomy.address import BackwardPhase, FrameKey
from megatron_lynx.runtime.stage_order import VirtualMicroBatch


@dataclass(eq=False)
class MicroBatch:
    """One pass of a micro-batch through one chunk of the stage."""

    number: int
    """Counted from 0 over the whole run; the same for all chunks that it passes through."""
    index: int = 0
    """Counted from 0 in each step; where batches overlap, since the pipeline was filled."""
    chunk: int = 0
    ahead: set[FrameKey] = field(default_factory=set)
    """Halves that were regenerated and that backward has not reached."""
    output: weakref.ref[Tensor] | None = None
    """Held weakly: an alias of the output would keep memory that the schedule frees."""
    phase: BackwardPhase = "steady"

    @property
    def virtual(self) -> VirtualMicroBatch:
        return self.index, self.chunk

    @property
    def alive(self) -> bool:
        return self.output is None or self.output() is not None
