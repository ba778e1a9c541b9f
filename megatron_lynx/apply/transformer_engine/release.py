"""What this package knows of one minor release of Transformer Engine: how the functions that it relies on read, and where the
autograd node of a linear with a norm inside keeps what the norm made."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.apply.releases.release import Release

ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


@dataclass(frozen=True, kw_only=True)
class EngineRelease(Release):
    """One row of knowledge."""

    norm_node: str
    """The node of autograd that a `LayerNormLinear` makes."""
    norm_slots: tuple[int, int, int]
    """Among what it saves: the norm's output, mean and reciprocal deviation (RMSNorm has no mean)."""
