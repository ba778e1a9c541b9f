"""Real megatron-core layers with gates on their attention: a subclass of `SelfAttention`, and a core around Megatron's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class GatedCore(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.inner = DotProductAttention(*args, **kwargs)
        self.gate: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = self.inner(*args, **kwargs)
        assert self.gate is not None, "called by GatedSelfAttention alone"
        return made * torch.sigmoid(self.gate)


class GatedSelfAttention(SelfAttention):  # type: ignore[misc]
    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.linear_gate = ColumnParallelLinear(
            config.hidden_size,
            self.query_projection_size,
            config=config,
            init_method=config.init_method,
            bias=config.add_bias_linear,
            gather_output=False,
        )

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gate, _ = self.linear_gate(hidden_states)
        core = self.core_attention
        before, core.gate = core.gate, gate
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            core.gate = before  # nothing per call lives on a module (rule R13): a recomputation may end before this call does


def gated(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """The same layers, with gates."""
    for layer in block.layer_specs:
        layer.submodules.self_attention.module = GatedSelfAttention
        layer.submodules.self_attention.submodules.core_attention = GatedCore
    return block
