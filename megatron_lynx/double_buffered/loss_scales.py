"""Keeps the loss scale of each batch: the one in force at its first backward, whatever updates have done to it since.

deferral 1       last stage                                                                    scale in force
batch j          B(j, last)         loss * s(j)
batch j + 1      B(j+1, 0)          loss * s(j+1)      begun, so it stays                      S
update Uj        grad / s(j)        overflow or not: the scaler counts, and moves S            S -> S'
batch j + 1      B(j+1, 1) ...      loss * s(j+1)      still S
update Uj+1      grad / s(j+1)      is S, and the scaler moves S'                              S' -> S''
batch j + 2      began under S'

So a batch has the scale that was in force with the version of the weights that it reads: S(max(j - 1, 0)) for batch j. Updates
come in order, each tells the scaler once whether its batch overflowed, and an overflow skips the update of that batch alone.
What Megatron logs and saves between updates is the scale in force.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any


class TwoLossScales:
    """The scales of an optimizer's parts, of the newest version and of the one before. Without scalers nothing is done.

    Args:
        optimizer: Megatron's, chained or not; none where updates are made at once: a batch then begins behind the last update.
    """

    def __init__(self, optimizer: Any) -> None:
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self._parts = [part for part in parts if getattr(part, "grad_scaler", None) is not None]
        self._scalers = [part.grad_scaler for part in self._parts]
        self._older = self._scalers
        self._newest = 0

    def show(self, version: int) -> None:
        """Let losses be scaled, and gradients unscaled, as with this version: the newest one or the one before."""
        assert max(self._newest - 1, 0) <= version <= self._newest, f"the scale of version {version} is gone or not there yet"
        for part, scaler in zip(self._parts, self._scalers if version == self._newest else self._older, strict=True):
            part.grad_scaler = scaler

    @contextmanager
    def update(self, version: int) -> Iterator[None]:
        """The step of a batch that was scaled as with this version goes inside; afterwards there is a newer scale in force."""
        older = [_as_it_is_now(scaler) for scaler in self._scalers]
        self.show(version)
        yield
        self._older, self._newest = older, self._newest + 1
        self.show(self._newest)

    def start_anew(self) -> None:
        """Count versions from the newest one. Nothing may be in flight."""
        self._newest = 0


def _as_it_is_now(scaler: Any) -> Any:
    """A scaler whose scale does not move: an update that unscales with it tells the one in force what it found."""
    kept = copy(scaler)
    kept.update = scaler.update
    return kept
