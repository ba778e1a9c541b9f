"""Sizes of multi-latent attention in jobs, profiles and plans: compressed ranks and head widths.

    latent: {kv_rank: 512, head_size: 128, rope_size: 64, value_head_size: 128}                     DeepSeek-V2-Lite
    latent: {q_rank: 1536, kv_rank: 512, head_size: 128, rope_size: 64, value_head_size: 128}       DeepSeek-V3

Each names the field of Megatron's model config; its flag has dashes (`--kv-lora-rank`).
"""

from __future__ import annotations

from pydantic import Field

from megatron_lynx.validation import Part


class LatentSizes(Part):
    """Widths in elements, over all tensor-parallel ranks."""

    q_rank: int | None = Field(default=None, ge=1)
    """Rank of compressed queries (`q_lora_rank`). If None, queries are projected from the residual stream."""
    kv_rank: int = Field(ge=1)
    """Rank of compressed keys and values, together (`kv_lora_rank`)."""
    head_size: int = Field(ge=1)
    """Width of a head's query and key without the rotary part (`qk_head_dim`)."""
    rope_size: int = Field(ge=1)
    """Width of the rotary part of a head's query, and of the key shared by all heads (`qk_pos_emb_head_dim`)."""
    value_head_size: int = Field(ge=1)
    """Width of a head's value (`v_head_dim`)."""
    fused_rotary: bool = False
    """Whether fused kernels rotate queries in place and assemble keys (`apply_rope_fusion`)."""

    @property
    def compressed(self) -> bool:
        """Whether queries are compressed."""
        return self.q_rank is not None

    @property
    def query_head_size(self) -> int:
        """Width of a head's query or key."""
        return self.head_size + self.rope_size

    @property
    def kv_down_width(self) -> int:
        """Output columns of the keys' and values' down-projection: latent and shared rotary key."""
        return self.kv_rank + self.rope_size

    @property
    def kv_head_size(self) -> int:
        """Output columns per head of the keys' and values' up-projection."""
        return self.head_size + self.value_head_size
