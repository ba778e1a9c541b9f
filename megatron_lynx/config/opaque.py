"""Halves that only some layers of a job have: opaque ones with their bytes and cost per token, and kinds with their sizes.

opaque: [{kind: gated_delta_net, layers: [1-3], delta: {...}}]                       sizes as in `kinds.delta.section`
opaque: [{kind: mamba, layers: [1-3], mamba: {...}}]                                 sizes as in `kinds.mamba.section`
opaque: [{kind: own_attention, layers: [1-3], parameters: 33554432, kept_bytes: 95232, in_hand_bytes: 73728, flops: 71000000}]

Bytes and FLOPs are per token and weights per layer, over all tensor-parallel ranks, which share them equally. Launches with
`--attention-output-gate` get them from the formulas below, read in the named code.
They were not measured, so bytes are multiplied by `MARGIN`. e: element bytes, h: width of the residual stream.

    gated attention   q width of queries, k of keys                                 `SelfAttention` with `attention_output_gate`
        e (9q + 6k)         output of the linear; queries and keys before and after their norm and rotated; values; result;
                            gate, its sigmoid, and the product

Transient bytes in backward: the gradients of the widest of these, and the recomputed chunk states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from megatron_lynx.config.experts import Layers, numbers_of
from megatron_lynx.kinds.delta.section import DELTA_NET, DeltaSizes
from megatron_lynx.kinds.mamba.section import MAMBA, MambaSizes
from megatron_lynx.kinds.opaque.section import NOTHING, OpaqueName
from megatron_lynx.validation import Part

MARGIN = 1.15


class Opaque(Part):
    """An opaque half of some layers, kept whole, on the device, or one that is planned from its sizes."""

    kind: OpaqueName
    """Its kind; `own_attention` and `own_mlp`: a fork's own module; `no_attention` and `no_mlp`: the layer has no such half."""
    layers: Layers = "all"
    """Its layers. n: the first of every n; or a list of layers (3) and ranges (5-8)."""
    parameters: int = Field(default=0, ge=0)
    """Weights, split over tensor-parallel ranks."""
    kept_bytes: int = Field(default=0, ge=0)
    """Bytes per token kept from forward to backward, besides the half's input and its norm's saved tensors."""
    in_hand_bytes: int = Field(default=0, ge=0)
    """Peak transient bytes per token in backward."""
    flops: int = Field(default=0, ge=0)
    """FLOPs per token in forward."""
    margin: float = Field(default=MARGIN, ge=1.0, le=10.0)
    """Factor on the bytes, which were not measured."""
    delta: DeltaSizes | None = None
    """Sizes of a gated delta net, from which all its figures follow."""
    mamba: MambaSizes | None = None
    """Sizes of a Mamba layer, in the same way."""

    def _problems(self) -> Iterator[str]:
        for name, kind in (("delta", DELTA_NET.name), ("mamba", MAMBA.name)):
            if (getattr(self, name) is not None) != (self.kind == kind):
                yield f"{name} is given with kind {kind}, and only with it; found kind {self.kind}"

    @property
    def nothing(self) -> bool:
        return self.kind in NOTHING

    def numbers(self, layers: int) -> frozenset[int]:
        return numbers_of(self.layers, layers)


def gated_attention(hidden: int, element: int, *, queries: int, keys: int, seq: int) -> dict[str, Any]:
    """Return the figures of attention with an output gate, by widths of queries and keys."""
    made = 2 * queries + 2 * keys
    return {
        "kind": "gated_attention",
        "parameters": hidden * (made + queries),
        "kept_bytes": element * (9 * queries + 6 * keys),
        "in_hand_bytes": element * (made + 3 * queries + 2 * keys),
        "flops": 2 * hidden * (made + queries) + 2 * seq * queries,
    }
