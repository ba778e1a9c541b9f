"""The names of windows: stretches in which the compute stream would wait for communication.

    layer l+1   ...                 forward runs down, backward runs up, attention before MLP in each layer
    layer l     attention | mlp
                     │        └ fwd.mlp.0       the collectives of a half, numbered in the order it issues them
                     └ fwd.attention.0

    text                   names
    bwd.mlp.0              the first collective that the backward of the *same* layer's MLP half waits for
    bwd.attention.0+1      the first one of the attention half of the layer above (layer l+1)
    fwd.mlp.0              the first one of the same layer's MLP half in the forward that runs just before this backward; with
                           several chunks on a stage that may be another chunk's: then of the layer at the same place in it
    pipe.recv_backward     receiving the gradient of this micro-batch from the next stage
    on_demand              none: the replay runs when backward asks for its first tensor, and is exposed

Without sequence parallelism every half has one collective in each pass (ordinal 0). With it, forward has two (0 gathers the
input, 1 scatters the output) and backward three (0 gathers the gradient, 1 gathers the input again, 2 scatters the gradient).
A half whose input is gathered once for its replay does not gather it again: it has no backward window 1.
A name is relative to the layer whose half is replayed, so that identical layers have identical entries in a plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megatron_lynx.items import Half

Pass = Literal["fwd", "bwd"]
PATTERN = r"(on_demand|pipe\.recv_backward|(fwd|bwd)\.(attention|mlp)\.\d(\+\d+)?)"
"""What a window is called in a plan file (a regular expression, also used by the plan's JSON schema)."""

ON_DEMAND = "on_demand"
RECV_BACKWARD: Literal["pipe.recv_backward"] = "pipe.recv_backward"


@dataclass(frozen=True, order=True)
class Collective:
    """One collective of one layer half: a window's place in a stage, with its layer as an absolute number."""

    passing: Pass
    layer: int
    half: Half
    ordinal: int

    def __str__(self) -> str:
        return f"{self.passing}.{self.half}.{self.ordinal}@{self.layer}"


Window = Collective | Literal["pipe.recv_backward", "on_demand"]


def window_at(text: str, layer: int) -> Window:
    """The window that `text` names, seen from `layer` (its number from 1). `text` must match `PATTERN`."""
    if text == ON_DEMAND:
        return "on_demand"
    if text == RECV_BACKWARD:
        return "pipe.recv_backward"
    match = re.fullmatch(r"(fwd|bwd)\.(attention|mlp)\.(\d)(?:\+(\d+))?", text)
    if match is None:
        raise ValueError(f"{text!r} names no window")
    passing, half, ordinal, above = match.groups()
    return Collective(passing, layer + int(above or 0), half, int(ordinal))  # type: ignore[arg-type]


def collectives_of(passing: Pass, sequence_parallel: bool) -> int:
    """How many collectives of the tensor-parallel group one layer half waits for in one pass (0 without a group)."""
    if not sequence_parallel:
        return 1
    return 2 if passing == "fwd" else 3
