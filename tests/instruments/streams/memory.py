"""Who read and wrote which bytes last, and whether the next one who does comes behind them.

Two accesses to the same bytes, one of which writes, by two actors of which neither comes behind the other, are a race: chance
decides which comes first. What an actor did to some bytes is remembered until it does the same to the same bytes again: what an
actor does is in order, so its last access stands for all before. A storage's account ends with the storage; who still works on
one that was let go is found by `happens_before`, which keeps it until then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.instruments.streams.order import Order

MOST_ACCOUNTS = 20_000
"""Accounts of storages, dead ones among them, before the dead ones are thrown away."""


class Access(NamedTuple):
    """One actor's reading or writing."""

    actor: str
    number: int
    """Of what the actor was given."""
    writes: bool
    what: str

    def __str__(self) -> str:
        return f"{self.what} ({'writes' if self.writes else 'reads'}, on {self.actor})"


class Race(NamedTuple):
    """Two accesses of which neither comes behind the other; `then` was issued second."""

    first: str
    then: str

    def __str__(self) -> str:
        return f"{self.then} does not wait for {self.first}"


class Span(NamedTuple):
    """Bytes of a storage."""

    begin: int
    end: int


@dataclass
class _Account:
    storage: StorageWeakRef
    last: dict[tuple[str, bool, Span], Access] = field(default_factory=dict)


class Memory:
    """The accounts of all storages that were read or written."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._accounts: dict[int, _Account] = {}

    def touched(self, tensor: Tensor, access: Access) -> list[Race]:
        """An actor reads or writes a tensor: the races that this makes."""
        span, account = span_of(tensor), self._account(tensor.untyped_storage())
        races = [Race(str(before), str(access)) for before in self._unordered(account, span, access)]
        account.last[access.actor, access.writes, span] = access
        return races

    def _unordered(self, account: _Account, span: Span, access: Access) -> list[Access]:
        return [
            before
            for (actor, wrote, other), before in account.last.items()
            if actor != access.actor
            and (wrote or access.writes)
            and other.begin < span.end
            and span.begin < other.end
            and not self._order.knows(access.actor, actor, before.number)
        ]

    def _account(self, storage: torch.UntypedStorage) -> _Account:
        account = self._accounts.get(storage._cdata)
        if account is None or account.storage.expired():
            if len(self._accounts) >= MOST_ACCOUNTS:
                self._accounts = {key: one for key, one in self._accounts.items() if not one.storage.expired()}
            account = self._accounts[storage._cdata] = _Account(StorageWeakRef(storage))
        return account


def span_of(tensor: Tensor) -> Span:
    """From its first byte to its last; those between that are not its own are taken for its own."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    return Span(begin, begin + reach * tensor.element_size())
