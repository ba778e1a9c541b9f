"""A core attention for ranks among which sequences are cut, with real exchanges over the context-parallel group.

Megatron leaves these exchanges to Transformer Engine's fused kernels, which need a GPU and its layers; its own attention refuses
to run among several context-parallel ranks. This one takes the place of both, and saves for backward what the kernels save.

    all_gather   keys and values of all ranks, gathered     scores of own queries       Megatron's own mappings, eager operators
    a2a          every rank's rows, of a part of the heads  scores of these heads
    p2p          keys and values go around a ring           `ring_attention`

Of a sequence in 2c slices rank r has slices r and 2c - 1 - r, as Megatron cuts it (`get_batch_on_this_cp_rank`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region

from megatron_lynx.testbed.ring_attention import RingAttention, all_rows, rows_of


class ContextAttention(torch.nn.Module):
    """Causal attention of one layer. Built and called as Megatron's layers build and call theirs.

    Shapes: s own rows, S all rows, b sequences, n heads, d head size.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.exchange = cp_comm_type or "p2p"
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.dropout = torch.nn.Dropout(dropout)
        self.tracked = not config.sequence_parallel
        self.group = parallel_state.get_context_parallel_group()

    def forward(
        self, query_sbnd: torch.Tensor, key_sbnd: torch.Tensor, value_sbnd: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """The mask is causal, whatever is passed. Of shape (s, b, n d)."""
        if self.exchange == "p2p" and self.dropout.p:  # asked here: latent attention builds one more that it never calls
            raise ValueError(f"attention_dropout ({self.dropout.p}) must be 0 with p2p: this ring drops nothing out")
        ranks, count, device = self.group.size(), len(query_sbnd), query_sbnd.device
        own = rows_of(self.group.rank(), ranks, count, device)
        if self.exchange == "p2p":
            ring: Any = RingAttention.apply
            widened = torch.nn.functional.pad(value_sbnd, (0, key_sbnd.shape[-1] - value_sbnd.shape[-1]))  # latent attention's
            result: torch.Tensor = ring(query_sbnd, key_sbnd, widened, self.scale, self.group)
            result = result[..., : value_sbnd.shape[-1]]
        elif self.exchange == "a2a":
            everywhere = all_rows(ranks, count, device)
            query, key, value = (self._traded(tensor) for tensor in (query_sbnd, key_sbnd, value_sbnd))
            result = self._traded_back(self._attended(query, key, value, everywhere, everywhere))
        else:
            key, value = (gather_from_sequence_parallel_region(tensor, group=self.group) for tensor in (key_sbnd, value_sbnd))
            result = self._attended(query_sbnd, key, value, own, all_rows(ranks, count, device))
        return result.flatten(2)

    def _attended(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        """`rows`, `columns`: places in the sequence of the queries, and of the keys and values."""
        heads = query.shape[2] // key.shape[2]
        key, value = (tensor.repeat_interleave(heads, dim=2) if heads > 1 else tensor for tensor in (key, value))
        scores = torch.einsum("sbnd,tbnd->bnst", query, key).float() * self.scale
        weights = scores.masked_fill(columns > rows[:, None], float("-inf")).softmax(dim=-1).to(value.dtype)
        if self.tracked:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                weights = self.dropout(weights)
        else:
            weights = self.dropout(weights)
        return torch.einsum("bnst,tbnd->sbnd", weights, value)

    def _traded(self, own: torch.Tensor) -> torch.Tensor:
        """(s, b, n, d) of own rows ──> (S, b, n/c, d) of own heads, rank by rank."""
        ranks = self.group.size()
        by_heads = own.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()
        traded: torch.Tensor = all_to_all(self.group, by_heads)
        return traded.flatten(0, 1)

    def _traded_back(self, own: torch.Tensor) -> torch.Tensor:
        by_rows = own.unflatten(0, (self.group.size(), -1)).contiguous()
        traded: torch.Tensor = all_to_all(self.group, by_rows)
        return traded.movedim(0, 2).flatten(2, 3)
