"""What this package knows of one minor release of Transformer Engine: the fingerprints of the functions that it relies on, and
where the autograd node of a linear with a norm inside keeps what the norm made."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.apply.releases.release import Release

ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


@dataclass(frozen=True, kw_only=True)
class TeRelease(Release):
    """The functions that matter in one release, and the layout of its nodes."""

    norm_node: str
    """The name of the autograd node that a `LayerNormLinear` makes."""
    norm_slots: tuple[int, int, int]
    """Where, among what that node saves, the norm's output, mean and reciprocal deviation are (RMSNorm has no mean)."""
