"""Halves of layers that nobody looks into, as a job file states them: what is kept of a token, and what it costs.

opaque: [{kind: own_attention, layers: [1-3], parameters: 33554432, kept_bytes: 95232, in_hand_bytes: 73728, flops: 71000000}]

Bytes and FLOPs are of one token, weights of one layer, over all tensor-parallel ranks: each rank has its part of them. A launch
with `--linear-attention-freq`, `--attention-output-gate` or Mamba layers has them by the formulas below. They were read in the
code that is named, not measured, so bytes are taken `MARGIN` times. e: bytes of an element, h: width of the residual stream.

    gated delta net   k, v widths of keys and values, a value heads of k', v'       `GatedDeltaNet.forward` (0.16 to 0.19), and
                                                                                    `ChunkGatedDeltaRuleFunction` of fla
        e (2k + v)          input of the convolution
        e (4k + 2 a k')     queries and keys: in front of their norm, behind it, and, with fewer key heads, repeated
        e (6v - v)          values, result, gate, normed result, gated result
        (64 + 16) e a       of chunks of 64 the scores; what makes decay and step
    Mamba-2           d inner width, G groups of states of N, a heads               `MambaMixer`, and
        e (2d + 2GN + a)    what the first linear made                              `MambaSplitConv1dScanCombinedFn` of mamba_ssm
        2 e d               the scan's result, and the normed one
    gated attention   q width of queries, k of keys                                 `SelfAttention` with `attention_output_gate`
        e (9q + 6k)         what the linear made; queries and keys in front of their norm, behind it, turned; values; result;
                            gate, its sigmoid, and the product

In backward the gradients of the widest of these are there at once, and states of chunks that are made again.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from megatron_lynx.config.experts import Layers, numbers_of
from megatron_lynx.kinds.opaque.section import NOTHING, OPAQUE, OpaqueName
from megatron_lynx.kinds.section import Section
from megatron_lynx.validation import Part

MARGIN = 1.15
"""Bytes that nobody has measured are taken so many times."""
CHUNK, SCAN_CHUNK = 64, 128
"""Tokens of a chunk of the gated delta rule (fla) and of Mamba's scan (`MambaMixer.chunk_size`)."""
CONVOLVED = 4
"""Tokens that Mamba's convolution sees."""


class Opaque(Part):
    """What some layers have in place of a half whose inside is known. It is kept whole, on the device."""

    kind: OpaqueName
    """What it is; `own_attention` and `own_mlp`: a fork's; `no_attention` and `no_mlp`: the layer has no such half."""
    layers: Layers = "all"
    """Which layers have it. n: the first of every n; a list of layers (3) and ranges (5-8)."""
    parameters: int = Field(default=0, ge=0)
    """Weights that are cut over tensor-parallel ranks."""
    kept_bytes: int = Field(default=0, ge=0)
    """What is kept of a token from forward to backward, beside the half's input and what its norm makes."""
    norm_out_bytes: int = Field(default=0, ge=0)
    """The part of `kept_bytes` that stock frees with `--recompute-modules gdn_norm_out`."""
    in_hand_bytes: int = Field(default=0, ge=0)
    """What backward has in hand of a token at most."""
    flops: int = Field(default=0, ge=0)
    """Of a token's forward."""
    margin: float = Field(default=MARGIN, ge=1.0, le=10.0)
    """How many times as many bytes are counted, because they were not measured."""

    @property
    def section(self) -> Section:
        return OPAQUE[self.kind]

    @property
    def nothing(self) -> bool:
        """Whether there is no such half."""
        return self.kind in NOTHING

    def numbers(self, layers: int) -> frozenset[int]:
        """The layers that have it, of a model with so many."""
        return numbers_of(self.layers, layers)

    def beyond(self, layers: int) -> int | None:
        """The first layer that is named of those that a model with so many does not have."""
        named = numbers_of(self.layers, 1_000) if isinstance(self.layers, tuple) else frozenset[int]()
        return min((number for number in named if number > layers), default=None)


def gated_delta_net(
    hidden: int, element: int, *, key_heads: int, key_size: int, value_heads: int, value_size: int, convolved: int
) -> dict[str, Any]:
    """The figures of a gated delta net. `element`: bytes of one number; `convolved`: tokens that its convolution sees."""
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
    """The figures of a Mamba-2 layer. `heads` left out: twice the residual stream's width, in heads of `size`."""
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
    """The figures of attention with a gate on its output, in widths of queries and of keys."""
    made = 2 * queries + 2 * keys
    return {
        "kind": "gated_attention",
        "parameters": hidden * (made + queries),
        "kept_bytes": element * (9 * queries + 6 * keys),
        "in_hand_bytes": element * (made + 3 * queries + 2 * keys),
        "flops": 2 * hidden * (made + queries) + 2 * seq * queries,
    }
