"""PipeOffload (2503.01328): the table of k, the copy-to-compute ratio of a GPT layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lynx.config import Model, Parallel
from megatron_lynx.cost.host_copy import copy_to_compute_ratio
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.published.row import Row

SOURCE = "PipeOffload, 2503.01328"
COMPUTE_FLOP_PER_S, COPY_BYTE_PER_S = 220e12, 15e9
"""As they state them for an A100."""


def rows(figures: Mapping[str, Any]) -> Iterator[Row]:
    """`figures`: their part of the file."""
    table = figures["k_table"]
    for hidden, printed in table["rows_hidden"].items():
        for seq, published in zip(table["columns_seq"], printed, strict=True):
            shape = LayerShape(_gpt(int(hidden), seq), Parallel(), micro=1)
            computed = copy_to_compute_ratio(shape, "balanced", COMPUTE_FLOP_PER_S, COPY_BYTE_PER_S)
            yield Row(SOURCE, f"table of k, hidden {hidden}, sequence {seq}", published, computed, "", 0.005, error_in="unit")


def _gpt(hidden: int, seq: int) -> Model:
    """A layer without dropout: with norms and activation replayed it keeps 20sbh."""
    heads = hidden // 128
    return Model(layers=1, hidden=hidden, ffn=4 * hidden, heads=heads, kv_groups=heads, vocab=51200, seq=seq)
