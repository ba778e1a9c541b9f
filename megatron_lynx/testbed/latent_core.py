"""Megatron's own core attention for latent attention, which no release from 0.15 to 0.19 can build: it is called with the widths
of keys and values, and does not take them. Nothing else keeps local layers from having latent attention."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention


class LatentCore(DotProductAttention):  # type: ignore[misc]
    """It reads the width of a value from `config.kv_channels`, of queries and keys from these themselves."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert v_channels in (None, self.config.kv_channels), f"kv_channels {self.config.kv_channels}, needed {v_channels}"
