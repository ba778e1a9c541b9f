"""DeepEP's buffers on CPU ranks: what Megatron's flex dispatcher asks of `deep_ep`, over all-to-alls of gloo.

Buffer            dispatch, combine: each token travels once to each rank that has any of its experts, on a stream of the buffer's
                  own. Who asks for an event gets outputs full of NaN, which are filled when that event is waited for
HybridEPBuffer    the same with rows sorted by expert, on the stream of the caller: nothing is to be waited for

rank 0   tokens a b ──dispatch──>  rank 0 gets those with an expert of its own, then what rank 1 sends it, ...
                    <──combine───  each token's parts are added up in the order of ranks
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.instruments.replacing import replace_entry

NAME = "deep_ep"


def stand_in_for_deep_ep() -> ExitStack:
    """Answer for the package until the returned stack is closed. To be in place before Megatron is imported."""
    undo = ExitStack()
    if NAME not in sys.modules and importlib.util.find_spec(NAME) is None:
        package, inner = ModuleType(NAME), ModuleType(f"{NAME}.utils")
        package.__path__ = []
        for owner, members in ((package, (Buffer, HybridEPBuffer)), (inner, (EventHandle, EventOverlap))):
            for member in members:
                setattr(owner, member.__name__, member)
        replace_entry(undo, sys.modules, NAME, package)
        replace_entry(undo, sys.modules, f"{NAME}.utils", inner)
    return undo


class EventHandle:
    """A point on the caller's stream, where all is over that was issued on a CPU."""


class EventOverlap:
    """A point on the buffer's stream."""

    def __init__(self, event: EventHandle | None = None, arrived: Callable[[], None] | None = None) -> None:
        self._arrived = arrived

    def current_stream_wait(self) -> None:
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            arrived()


class Hint:
    """How large a buffer is to be."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


@dataclass(frozen=True)
class Route:
    """Which of a rank's tokens go to which rank, and how many come from each."""

    group: Any
    chosen: tuple[Tensor, ...]
    """By rank: the tokens that it gets, in order."""
    came: tuple[int, ...]
    """By rank: how many tokens come from it."""
    tokens: int
    """Of this rank."""
    order: Tensor | None = None
    """Of what came the rows, sorted by expert, where they are handed on so."""
    experts: tuple[Tensor, ...] = ()
    """By rank: of the tokens that it gets, which of its experts they are for."""

    def out(self, rows: Tensor, *, later: bool) -> tuple[Tensor, Callable[[], None]]:
        """Rows on their way; what came, and what has to be called before that is read."""
        sent = torch.cat([rows[chosen] for chosen in self.chosen])
        return _exchanged(self.group, sent, [len(chosen) for chosen in self.chosen], list(self.came), later=later)

    def back(self, rows: Tensor, *, later: bool) -> tuple[Tensor, Callable[[], None]]:
        """Rows on their way back, added up for each token."""
        parts, arrive = _exchanged(self.group, rows, list(self.came), [len(chosen) for chosen in self.chosen], later=later)
        made = rows.new_full((self.tokens, *rows.shape[1:]), float("nan"))

        def add_up() -> None:
            arrive()
            made.zero_()
            for chosen, part in zip(self.chosen, parts.split([len(each) for each in self.chosen]), strict=True):
                made.index_add_(0, chosen, part)

        if not later:
            add_up()
        return made, add_up if later else _nothing


def _nothing() -> None:
    """All has arrived."""


def _exchanged(group: Any, rows: Tensor, sent: list[int], came: list[int], *, later: bool) -> tuple[Tensor, Callable[[], None]]:
    found = rows.new_empty((sum(came), *rows.shape[1:]))
    rows = rows.contiguous()
    if not later:
        dist.all_to_all_single(found, rows, came, sent, group=group)
        return found, _nothing
    arrived = torch.empty_like(found)
    if found.is_floating_point():
        found.fill_(float("nan"))
    work = dist.all_to_all_single(arrived, rows, came, sent, group=group, async_op=True)

    def arrive() -> None:
        work.wait()
        found.copy_(arrived)

    return found, arrive


def _counts(group: Any, sent: list[int]) -> list[int]:
    found = torch.empty(len(sent), dtype=torch.int64)
    dist.all_to_all_single(found, torch.tensor(sent), group=group)
    return [int(count) for count in found]


class Buffer:
    """Buffers for a group of ranks."""

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(count: int) -> None:
        """A CPU has none."""

    @staticmethod
    def get_dispatch_config(ranks: int) -> Hint:
        return Hint()

    @staticmethod
    def get_combine_config(ranks: int) -> Hint:
        return Hint()

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **how: Any) -> tuple[Any, ...]:
        ranks = self.group.size()
        of_rank = num_experts // ranks
        chosen = torch.stack([((topk_idx // of_rank == rank) & (topk_idx >= 0)).any(1) for rank in range(ranks)], 1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0].flatten(), minlength=num_experts)
        return chosen.sum(0), None, per_expert, chosen, EventOverlap(EventHandle())

    def dispatch(
        self,
        x: Tensor,
        handle: Route | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        async_finish: bool = False,
        **how: Any,
    ) -> tuple[Any, ...]:
        if handle is not None:
            rows, arrive = handle.out(x, later=async_finish)
            return rows, None, None, None, None, EventOverlap(arrived=arrive)
        assert topk_idx is not None
        assert topk_weights is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        chosen = tuple(each.nonzero().flatten() for each in is_token_in_rank.unbind(1))
        route = Route(self.group, chosen, tuple(_counts(self.group, [len(each) for each in chosen])), len(x))
        ranks, rank = self.group.size(), self.group.rank()
        of_rank = len(num_tokens_per_expert) // ranks
        indices, _ = route.out(topk_idx, later=False)
        weights, _ = route.out(topk_weights, later=False)
        own = indices // of_rank == rank
        local = torch.where(own & (indices >= 0), indices - rank * of_rank, -1)
        weights = torch.where(local >= 0, weights, torch.zeros_like(weights))
        counts = [int((local == expert).sum()) for expert in range(of_rank)]
        rows, arrive = route.out(x, later=async_finish)
        return rows, local, weights, counts, route, EventOverlap(arrived=arrive)

    def combine(
        self, x: Tensor, handle: Route, topk_weights: Tensor | None = None, async_finish: bool = False, **how: Any
    ) -> tuple[Any, ...]:
        weights = None if topk_weights is None else handle.back(topk_weights, later=False)[0]
        rows, arrive = handle.back(x, later=async_finish)
        return rows, weights, EventOverlap(arrived=arrive)


class HybridEPBuffer:
    """Buffers of which rows come sorted by expert."""

    def __init__(self, group: Any, **sizes: Any) -> None:
        self.group = group

    def dispatch_with_permute(
        self,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        handle: Route | None = None,
        **how: Any,
    ) -> tuple[Any, ...]:
        if handle is not None:
            assert handle.order is not None
            rows, _ = handle.out(hidden, later=False)
            return rows[handle.order], None, None, None, handle
        assert routing_map is not None
        assert num_of_experts_per_rank is not None
        of_ranks = routing_map.bool().split(num_of_experts_per_rank, 1)
        chosen = tuple(each.any(1).nonzero().flatten() for each in of_ranks)
        came = tuple(_counts(self.group, [len(each) for each in chosen]))
        route = Route(self.group, chosen, came, len(hidden))
        experts = tuple(mine[tokens] for mine, tokens in zip(of_ranks, chosen, strict=True))
        mine = torch.cat([each.to(torch.uint8) for each in experts])
        local, _ = _exchanged(self.group, mine, [len(each) for each in chosen], list(came), later=False)
        expert, order = local.T.nonzero().unbind(1)
        counts = torch.bincount(expert, minlength=num_of_experts_per_rank)
        route = Route(self.group, chosen, came, len(hidden), order, experts)
        rows, _ = route.out(hidden, later=False)
        weights = None
        if probs is not None:
            parts = [part[tokens] for part, tokens in zip(probs.split(num_of_experts_per_rank, 1), chosen, strict=True)]
            found, _ = _exchanged(self.group, torch.cat(parts), [len(each) for each in chosen], list(came), later=False)
            weights = found.T[local.T.bool()]
        return rows[order], weights, None, counts, route

    def combine_with_unpermute(
        self, hidden: Tensor, handle: Route, probs: Tensor | None = None, **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        assert handle.order is not None
        rows = hidden.new_zeros((sum(handle.came), hidden.shape[1])).index_add_(0, handle.order, hidden)
        combined, _ = handle.back(rows, later=False)
        return combined, None if probs is None else self._weights_back(probs, handle)

    def _weights_back(self, gradients: Tensor, handle: Route) -> Tensor:
        """Gradients of probabilities, by token and expert of all ranks."""
        assert handle.order is not None
        of_rank = handle.experts[0].shape[1]
        mine = torch.cat([each.to(torch.uint8) for each in handle.experts])
        sizes = [len(each) for each in handle.chosen]
        local, _ = _exchanged(self.group, mine, sizes, list(handle.came), later=False)
        table = gradients.new_zeros((of_rank, sum(handle.came)))
        table[local.T.bool()] = gradients
        back, _ = _exchanged(self.group, table.T, list(handle.came), sizes, later=False)
        made = gradients.new_zeros((handle.tokens, of_rank * len(sizes)))
        for rank, (tokens, part) in enumerate(zip(handle.chosen, back.split(sizes), strict=True)):
            made[tokens, rank * of_rank : (rank + 1) * of_rank] = part
        return made
