"""What this package knows of one minor release of Transformer Engine: how the functions that it relies on read, and where the
autograd node of a linear with a norm inside keeps what the norm made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_lynx.apply.releases.release import Release, differing
from megatron_lynx.errors import Problem

ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


@dataclass(frozen=True, kw_only=True)
class TeRelease(Release):
    """One row of knowledge."""

    norm_node: str
    """The node of autograd that a `LayerNormLinear` makes."""
    norm_slots: tuple[int, int, int]
    """Among what it saves: the norm's output, mean and reciprocal deviation (RMSNorm has no mean)."""
    norm_slots_fp8: tuple[int, int, int, int, int] = (-5, -4, -3, -2, -1)
    """The same in FP8, from the end, where the output is three tensors: its bytes by rows, by columns, and their scale."""
    in_fp8: Mapping[str, str] = field(default_factory=dict)
    """The functions that matter in FP8 alone."""

    def stale_in_fp8(self) -> list[Problem]:
        """Those of them that do not read as recorded."""
        return differing(self.in_fp8)
