"""Sizes of multi-latent attention, as jobs, profiles and plans state them: what tokens are compressed to, and how wide heads are.

    latent: {kv_rank: 512, head_size: 128, rope_size: 64, value_head_size: 128}                     DeepSeek-V2-Lite
    latent: {q_rank: 1536, kv_rank: 512, head_size: 128, rope_size: 64, value_head_size: 128}       DeepSeek-V3

The field of Megatron's model config is named with each; its flag is that name with dashes (`--kv-lora-rank`).
"""

from __future__ import annotations

from pydantic import Field

from megatron_lynx.validation import Part


class LatentSizes(Part):
    """Widths of one attention, over all tensor-parallel ranks. They count elements."""

    q_rank: int | None = Field(default=None, ge=1)
    """What a token's queries are compressed to (`q_lora_rank`). None: queries are projected from the residual stream at once."""
    kv_rank: int = Field(ge=1)
    """What a token's keys and values are compressed to, together (`kv_lora_rank`)."""
    head_size: int = Field(ge=1)
    """Width of a head's query and key without their rotary part (`qk_head_dim`)."""
    rope_size: int = Field(ge=1)
    """Width of the rotary part of a head's query, and of the one key that all heads share (`qk_pos_emb_head_dim`)."""
    value_head_size: int = Field(ge=1)
    """Width of a head's value (`v_head_dim`)."""
    fused_rotary: bool = False
    """Whether one kernel turns the rotary parts of queries in place, and another puts keys together (`apply_rope_fusion`)."""

    @property
    def compressed(self) -> bool:
        """Whether queries are compressed, too."""
        return self.q_rank is not None

    @property
    def query_head_size(self) -> int:
        """Width of a head's whole query and key."""
        return self.head_size + self.rope_size

    @property
    def kv_down_width(self) -> int:
        """Columns that the down-projection of keys and values makes: the compressed ones, and the shared rotary key."""
        return self.kv_rank + self.rope_size

    @property
    def kv_head_size(self) -> int:
        """Columns that the up-projection of keys and values makes for each head."""
        return self.head_size + self.value_head_size
