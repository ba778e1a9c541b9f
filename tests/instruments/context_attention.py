"""A core attention for ranks among which sequences are cut, with real exchanges over the context-parallel group.

Megatron leaves these exchanges to Transformer Engine's fused kernels, which need a GPU and its layers; its own attention refuses
to run among several context-parallel ranks. This one takes the place of both, and saves for backward what the kernels save.

    all_gather   keys and values of all ranks, gathered     scores of own queries       Megatron's own mappings, eager operators
    a2a          every rank's rows, of a part of the heads  scores of these heads
    p2p          keys and values go around a ring           `RingAttention`

Of a sequence in 2c slices rank r has slices r and 2c - 1 - r, as Megatron cuts it (`get_batch_on_this_cp_rank`); of packed
sequences, of which `all_gather` takes any number, those of each.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region


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
        if self.exchange not in ("p2p", "all_gather", "a2a"):
            raise ValueError(f"cp_comm_type ({self.exchange}) must be p2p, all_gather or a2a here")
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.dropout = torch.nn.Dropout(dropout)
        self.tracked = not config.sequence_parallel
        self.group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query_sbnd: torch.Tensor,
        key_sbnd: torch.Tensor,
        value_sbnd: torch.Tensor,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        """The mask is causal, whatever is passed. Of shape (s, b, n d); of packed sequences all are without b."""
        if packed_seq_params is not None:
            return self._of_packed(query_sbnd, key_sbnd, value_sbnd, packed_seq_params.cu_seqlens_q.tolist())
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

    def _of_packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int]) -> torch.Tensor:
        """Each sequence by itself: its rows are together on every rank."""
        if self.exchange != "all_gather":
            raise ValueError(f"cp_comm_type ({self.exchange}) must be all_gather where sequences are packed")
        ranks, device = self.group.size(), query.device
        gathered = (gather_from_sequence_parallel_region(tensor, group=self.group) for tensor in (key, value))
        keys, values = (tensor.unflatten(0, (ranks, -1)) for tensor in gathered)
        parts = []
        for first, last in pairwise(end // ranks for end in ends):
            own, everywhere = rows_of(self.group.rank(), ranks, last - first, device), all_rows(ranks, last - first, device)
            k, v = (tensor[:, first:last].flatten(0, 1).unsqueeze(1) for tensor in (keys, values))
            parts.append(self._attended(query[first:last].unsqueeze(1), k, v, own, everywhere).squeeze(1))
        return torch.cat(parts).flatten(1)

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


class TeContextAttention:
    """Transformer Engine's module for the core attention without a GPU, whose exchange needs fused kernels: called, it does what
    `ContextAttention` does."""

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:  # type: ignore[misc]
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        module: torch.nn.Module = TEDotProductAttention(config, *args, **kwargs)
        module.forward = ContextAttention(config, *args, **kwargs).forward
        return module


class RingAttention(torch.autograd.Function):
    """`apply(query_sbnd, key_sbnd, value_sbnd, scale, group)`. Shapes: s own rows, b sequences, n heads, d head size.

    forward     turn t: rank r works on what rank r - t has, and meanwhile passes it on to rank r + 1
    backward    turn t: rank r works on what rank r + 1 + t has, and passes it on to rank r - 1, with its gradients so far; in the
                last turn these are back where they belong

    For backward it saves the queries, the keys and values that came last, the result, and the logarithm of each row's sum.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, group: Any) -> torch.Tensor:
        ranks, rank = group.size(), group.rank()
        pair = torch.stack([key, value])
        result, log_sum = query.new_zeros(query.shape, dtype=torch.float32), None
        for turn in range(ranks):
            coming = _Passing(pair, rank + 1, rank - 1, group) if turn < ranks - 1 else None
            scores = _scores(query, pair[0], scale, rank, (rank - turn) % ranks, ranks)
            part = scores.logsumexp(dim=-1)
            together = part if log_sum is None else torch.logaddexp(log_sum, part)  # of a row's own turn, which is the first
            weighed = torch.einsum("bnst,tbnd->sbnd", (scores - together[..., None]).exp(), _each_head(pair[1], query))
            before = result if log_sum is None else result * _by_row((log_sum - together).exp())
            result, log_sum = before + weighed, together
            pair = pair if coming is None else coming.arrived()
        output = result.to(query.dtype)
        ctx.save_for_backward(query.view(2, -1, *query.shape[1:]), pair, output, log_sum)
        ctx.scale, ctx.group = scale, group
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,) = gradients
        halves, pair, output, log_sum = ctx.saved_tensors
        query, ranks, rank = halves.flatten(0, 1), ctx.group.size(), ctx.group.rank()
        of_query = torch.zeros_like(query, dtype=torch.float32)
        of_pair = torch.zeros_like(pair, dtype=torch.float32)
        weighed = torch.einsum("sbnd,sbnd->bns", gradient.float(), output.float())
        for turn in range(ranks):
            coming = _Passing(pair, rank - 1, rank + 1, ctx.group) if turn < ranks - 1 else None
            key, value = _each_head(pair[0], query), _each_head(pair[1], query)
            scores = _scores(query, pair[0], ctx.scale, rank, (rank + 1 + turn) % ranks, ranks)
            weights = (scores - log_sum[..., None]).exp()
            of_weights = torch.einsum("sbnd,tbnd->bnst", gradient.float(), value)
            of_scores = weights * (of_weights - weighed[..., None]) * ctx.scale
            of_query += torch.einsum("bnst,tbnd->sbnd", of_scores, key)
            of_pair[0] += _each_group(torch.einsum("bnst,sbnd->tbnd", of_scores, query.float()), pair[0])
            of_pair[1] += _each_group(torch.einsum("bnst,sbnd->tbnd", weights, gradient.float()), pair[1])
            if coming is not None:
                pair, of_pair = coming.arrived(), _Passing(of_pair, rank - 1, rank + 1, ctx.group).arrived()
        of_key, of_value = of_pair.to(query.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None


class _Passing:
    """A tensor on its way to one neighbour, while another of its size comes from the other."""

    def __init__(self, tensor: torch.Tensor, to: int, source: int, group: Any) -> None:
        ranks = group.size()
        self._sent, self._coming = tensor.contiguous(), torch.empty_like(tensor)
        self._works = [
            dist.isend(self._sent, dist.get_global_rank(group, to % ranks), group=group),
            dist.irecv(self._coming, dist.get_global_rank(group, source % ranks), group=group),
        ]

    def arrived(self) -> torch.Tensor:
        for work in self._works:
            if work is not None:
                work.wait()
        return self._coming


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, rank: int, other: int, ranks: int) -> torch.Tensor:
    """Of shape (b, n, s, s), in fp32: what comes later in the sequence is out of sight."""
    rows, columns = (rows_of(each, ranks, len(query), query.device) for each in (rank, other))
    scores = torch.einsum("sbnd,tbnd->bnst", query.float(), _each_head(key, query)) * scale
    return scores.masked_fill(columns > rows[:, None], float("-inf"))


def _each_head(keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values in fp32, for each head of the queries."""
    return keys.float().repeat_interleave(query.shape[2] // keys.shape[2], dim=2)


def _each_group(of_heads: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    groups: torch.Tensor = of_heads.unflatten(2, (keys.shape[2], -1)).sum(dim=3)
    return groups


def _by_row(of_rows: torch.Tensor) -> torch.Tensor:
    """(b, n, s) as a factor of (s, b, n, d)."""
    return of_rows.permute(2, 0, 1)[..., None]


def rows_of(rank: int, ranks: int, count: int, device: torch.device) -> torch.Tensor:
    """The places in a sequence of the `count` rows that a rank has."""
    half = torch.arange(count // 2, device=device)
    return torch.cat([half + rank * (count // 2), half + (2 * ranks - 1 - rank) * (count // 2)])


def all_rows(ranks: int, count: int, device: torch.device) -> torch.Tensor:
    """Those of all ranks, one after the other."""
    return torch.cat([rows_of(rank, ranks, count, device) for rank in range(ranks)])
