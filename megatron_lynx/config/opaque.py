"""Opaque halves of layers in a job file: their activations per token and their cost.

opaque: [{kind: own_attention, layers: [1-3], parameters: 33554432, kept_bytes: 95232, in_hand_bytes: 73728, flops: 71000000}]

Bytes and FLOPs are per token and weights per layer, over all tensor-parallel ranks, which share them equally. Launches with
`--linear-attention-freq`, `--attention-output-gate` or Mamba layers get them from the formulas below, read in the named code.
They were not measured, so bytes are multiplied by `MARGIN`. e: element bytes, h: width of the residual stream.

    gated delta net   k, v widths of keys and values, a value heads of k', v'       `GatedDeltaNet.forward` (0.16 to 0.19), and
                                                                                    `ChunkGatedDeltaRuleFunction` of fla
        e (2k + v)          input of the convolution
        e (4k + 2 a k')     queries and keys: before and after their norm, and repeated if there are fewer key heads
        e (6v - v)          values, result, gate, normed result, gated result
        (64 + 16) e a       scores of chunks of 64; inputs of decay and step
    Mamba-2           d inner width, G groups of states of N, a heads               `MambaMixer`, and
        e (2d + 2GN + a)    output of the first linear                              `MambaSplitConv1dScanCombinedFn` of mamba_ssm
        2 e d               result of the scan, and the normed one
    gated attention   q width of queries, k of keys                                 `SelfAttention` with `attention_output_gate`
        e (9q + 6k)         output of the linear; queries and keys before and after their norm and rotated; values; result;
                            gate, its sigmoid, and the product

Transient bytes in backward: the gradients of the widest of these, and the recomputed chunk states.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from megatron_lynx.config.experts import Layers, numbers_of
from megatron_lynx.kinds.opaque.section import NOTHING, OPAQUE, OpaqueName
from megatron_lynx.kinds.section import Section
from megatron_lynx.validation import Part

MARGIN = 1.15
CHUNK, SCAN_CHUNK = 64, 128
"""Tokens per chunk of the gated delta rule (fla) and of Mamba's scan (`MambaMixer.chunk_size`)."""
CONVOLVED = 4
"""Width of Mamba's convolution in tokens."""


class Opaque(Part):
    """An opaque half of some layers, kept whole, on the device."""

    kind: OpaqueName
    """Its kind; `own_attention` and `own_mlp`: a fork's own module; `no_attention` and `no_mlp`: the layer has no such half."""
    layers: Layers = "all"
    """Its layers. n: the first of every n; or a list of layers (3) and ranges (5-8)."""
    parameters: int = Field(default=0, ge=0)
    """Weights, split over tensor-parallel ranks."""
    kept_bytes: int = Field(default=0, ge=0)
    """Bytes per token kept from forward to backward, besides the half's input and its norm's saved tensors."""
    norm_out_bytes: int = Field(default=0, ge=0)
    """Part of `kept_bytes` that stock frees with `--recompute-modules gdn_norm_out`."""
    in_hand_bytes: int = Field(default=0, ge=0)
    """Peak transient bytes per token in backward."""
    flops: int = Field(default=0, ge=0)
    """FLOPs per token in forward."""
    margin: float = Field(default=MARGIN, ge=1.0, le=10.0)
    """Factor on the bytes, which were not measured."""

    @property
    def section(self) -> Section:
        return OPAQUE[self.kind]

    @property
    def nothing(self) -> bool:
        return self.kind in NOTHING

    def numbers(self, layers: int) -> frozenset[int]:
        return numbers_of(self.layers, layers)


def gated_delta_net(
    hidden: int, element: int, *, key_heads: int, key_size: int, value_heads: int, value_size: int, convolved: int
) -> dict[str, Any]:
    """Return the figures of a gated delta net. `element`: bytes per value; `convolved`: width of its convolution in tokens."""
    keys, values, repeated = key_heads * key_size, value_heads * value_size, value_heads * key_size
    made = 2 * keys + 2 * values + 2 * value_heads
    inside = 6 * CHUNK * key_size + 4 * CHUNK * value_size + 6 * key_size * value_size
    states = value_heads * key_size * value_size // CHUNK
    return {
        "kind": "gated_delta_net",
        "parameters": hidden * (made + values) + convolved * (2 * keys + values) + 2 * value_heads + value_size,
        "kept_bytes": element * (6 * keys + 2 * repeated * (value_heads > key_heads) + 6 * values + 80 * value_heads),
        "norm_out_bytes": 2 * element * values,  # the normed result, and its product with the gate
        "in_hand_bytes": element * (4 * repeated + 4 * values + 3 * states),
        "flops": 2 * hidden * (made + values) + 2 * convolved * (2 * keys + values) + value_heads * inside,
    }


def mamba(hidden: int, element: int, *, heads: int | None, size: int, groups: int, state: int) -> dict[str, Any]:
    """Return the figures of a Mamba-2 layer. Default `heads`: twice the residual stream's width, in heads of `size`."""
    heads = 2 * hidden // size if heads is None else heads
    inner = heads * size
    made = 2 * inner + 2 * groups * state + heads
    inside = heads * (2 * SCAN_CHUNK * size + 4 * state * size) + 2 * groups * SCAN_CHUNK * state
    return {
        "kind": "mamba",
        "parameters": hidden * (made + inner) + (CONVOLVED + 1) * (inner + 2 * groups * state) + 3 * heads + inner,
        "kept_bytes": element * (made + 2 * inner),
        "in_hand_bytes": 2 * element * made + 3 * 4 * inner * state // SCAN_CHUNK,
        "flops": 2 * hidden * (made + inner) + 2 * CONVOLVED * (inner + 2 * groups * state) + inside,
    }


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
