"""PipeOffload (2503.01328), figure 1, left: k, the copy-to-compute ratio of a GPT layer.

    k = 2 x bytes / B_o   /   (3 x FLOPs of a forward / B_c)          norms, GELU and dropout are recomputed

With as many key/value heads as heads (20sbh bytes) this is their formula 1, 10 / (3(6h + s)) x B_c / B_o. Their printed figures
are for the models that they ran, with eight key/value heads and (16h + 4096)sb bytes. Their caption says 220 TFLOP/s, but every
printed digit results from 230, and from no rate more than 0.02 away. So this file uses 230, its only constant, and their 15 GB/s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lynx.anatomy import Section
from megatron_lynx.config import Model, Parallel
from megatron_lynx.cost.recompute import BALANCED, kept_bytes, recomputation_of
from megatron_lynx.kinds.planning import flops_of, planning_of
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.published.row import Row
from megatron_lynx.stock import SELECTIVE
from megatron_lynx.stock.layer import layer_bytes

SOURCE = "PipeOffload, 2503.01328"
COMPUTE_FLOP_PER_S, COPY_BYTE_PER_S = 230e12, 15e9
CALIBRATING = ((6144, 16384), (8192, 4096))
"""Figures that a rate of 0.02 more, or less, would round differently."""
HEAD_SIZE, KEY_VALUE_HEADS = 128, 8
"""The same in all their models (table 2)."""


def rows(figures: Mapping[str, Any]) -> Iterator[Row]:
    table = figures["k_table"]
    for hidden, printed in table["rows_hidden"].items():
        for seq, published in zip(table["columns_seq"], printed, strict=True):
            computed = _ratio(LayerShape(_gpt(int(hidden), seq), Parallel(), micro=1))
            chose = "the compute rate" if (int(hidden), seq) in CALIBRATING else None
            what = f"figure 1: k, hidden {hidden}, sequence {seq}"
            yield Row(SOURCE, what, published, computed, "", bound=0.005, error_in="unit", calibrates=chose)


def _ratio(shape: LayerShape) -> float:
    """They do not count fused attention's statistics, four bytes for each row and head."""
    copied = sum(_kept_bytes(shape, section) for section in shape.model.kind_sections(experts=False))
    statistics = kept_bytes(shape) - sum(half.stays for half in layer_bytes(shape, SELECTIVE))
    return copy_to_compute_ratio(copied - statistics, sum(flops_of(shape).values()))


def _kept_bytes(shape: LayerShape, section: Section) -> int:
    items = tuple(item for item in BALANCED if item in section.names)
    return shape.input_bytes + recomputation_of(section, planning_of(section).tensors(shape), items).stays_bytes


def copy_to_compute_ratio(copied_bytes: int, forward_flops: int, flop_per_s: float = COMPUTE_FLOP_PER_S) -> float:
    return (2 * copied_bytes / COPY_BYTE_PER_S) / (3 * forward_flops / flop_per_s)


def _gpt(hidden: int, seq: int) -> Model:
    """Their model, without dropout masks, which are recomputed from the seed."""
    heads = hidden // HEAD_SIZE
    return Model(layers=1, hidden=hidden, ffn=4 * hidden, heads=heads, kv_groups=KEY_VALUE_HEADS, vocab=51200, seq=seq)
