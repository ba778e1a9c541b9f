"""Reads the batches of a checked step once, and gives copies of them to every pass over it.

    pass 1     next ─> Megatron's iterator ─> kept ─> a copy
    pass 2     next ─────────────────────────> kept ─> a copy

A forward step may change what it was given, so each pass gets a copy. Where reading itself draws random numbers (a dataset that
augments), later passes find the numbers advanced as the reading had left them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from megatron_lynx.launch.check.training_state import AllRandom


@dataclass(frozen=True)
class _Read:
    batch: Any
    random_behind: Any
    """The random state after reading it, where reading drew numbers."""


class Batches:
    """Stands in for one data iterator of a step."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._random = AllRandom()
        self._read: list[_Read] = []
        self._next = 0

    def again(self) -> None:
        """The next pass begins with the first batch."""
        self._next = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._read):
            self._read.append(self._from_source())
        elif (behind := self._read[self._next].random_behind) is not None:
            self._random.restore(behind)
        self._next += 1
        return copy.deepcopy(self._read[self._next - 1].batch)

    def _from_source(self) -> _Read:
        before = self._random.capture()
        batch = next(self._source)
        behind = self._random.capture()
        return _Read(batch, None if self._random.same(before, behind) else behind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class DataIterators:
    """Stands in for the data iterators that Megatron hands to its schedule: one, one for each chunk, or None on ranks that read
    nothing."""

    def __init__(self, given: Any) -> None:
        self._batches: dict[int, Batches] = {}
        self.stand_in = [self._for(one) for one in given] if isinstance(given, list) else self._for(given)

    def again(self) -> None:
        for batches in self._batches.values():
            batches.again()

    def _for(self, source: Any) -> Batches | None:
        if source is None:
            return None
        if id(source) not in self._batches:  # chunks may share one
            self._batches[id(source)] = Batches(source)
        return self._batches[id(source)]
