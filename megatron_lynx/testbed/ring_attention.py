"""Causal attention whose keys and values go around a ring of context-parallel ranks, as Transformer Engine's does.

    forward     turn t: rank r works on what rank r - t has, and meanwhile passes it on to rank r + 1
    backward    turn t: rank r works on what rank r + 1 + t has, and passes it on to rank r - 1, with its gradients so far; in the
                last turn these are back where they belong

For backward it saves the queries, the keys and values that came last, the result, and the logarithm of each row's sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class RingAttention(torch.autograd.Function):
    """`apply(query_sbnd, key_sbnd, value_sbnd, scale, group)`. Shapes: s own rows, b sequences, n heads, d head size."""

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
