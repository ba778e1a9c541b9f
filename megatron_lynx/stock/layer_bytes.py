"""What one layer holds under a stock setting: its two halves, or its input alone where it is recomputed as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.dense_bytes import dense_half_bytes
from megatron_lynx.stock.expert_bytes import expert_half_bytes
from megatron_lynx.stock.held import HalfBytes
from megatron_lynx.stock.offload import LEAST_ELEMENTS
from megatron_lynx.stock.setting import StockSetting

LayerBytes = tuple[HalfBytes, ...]
"""By half, in the order of a forward."""


@lru_cache(maxsize=4096)
def layer_bytes(shape: LayerShape, setting: StockSetting, experts: bool = False, least: int = LEAST_ELEMENTS) -> LayerBytes:
    """One layer whose modules are recomputed or offloaded. `least`: elements of the smallest tensor that is offloaded."""
    least_bytes = least * shape.model.element_bytes
    return tuple(
        expert_half_bytes(shape, setting, least_bytes)
        if section.in_some_layers
        else dense_half_bytes(shape, setting, section, least_bytes)
        for section in shape.model.kind_sections(experts=experts)
    )


def kept_bytes(layers: Sequence[LayerBytes]) -> int:
    """What stays on the device of these layers."""
    return sum(half.stays for layer in layers for half in layer)
