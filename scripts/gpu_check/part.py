"""One part of the acceptance run, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

from scripts.gpu_check.machine import Machine

Status = Literal["passed", "failed", "skipped", "not run"]


@dataclass(frozen=True)
class Answer:
    """What one rank says about a part."""

    wrong: tuple[str, ...] = ()
    """What is not as it must be; nothing: the part passed on this rank."""
    notes: tuple[str, ...] = ()
    """What a reader should know of it."""
    stock_s: float | None = None
    """Seconds of a step of stock Megatron, and of ours."""
    ours_s: float | None = None
    stock_bytes: int | None = None
    """The most that a step of stock allocated on the device; None where nobody counts it."""
    ours_bytes: int | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What else was measured."""


@dataclass(frozen=True)
class Part:
    """Something to be shown.

    `function(rank, *given)` answers on each of `ranks` ranks, in processes that other parts of as many ranks, with the same
    environment, have run in before it.
    """

    name: str
    shows: str
    """In words, for the page."""
    ranks: int
    function: Callable[..., Answer]
    given: tuple[Any, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its processes."""
    lacking: Callable[[Machine], str | None] = lambda machine: None
    """Why it cannot run on such a machine; None where it can."""
    apart: bool = False
    """Whether no other part may run in its processes."""
    opens: bool = False
    """Whether parts of as many ranks, and of more, cannot run where it fails."""
    beside: Callable[[], AbstractContextManager[Mapping[str, str]]] | None = None
    """What runs while its processes live, and adds to their environment. It raises `mps.Refused` where it cannot: then the part
    is skipped."""
    one_gpu: bool = False
    """Whether its ranks share one GPU, however many there are."""
    limit_s: float = float("inf")
    """Seconds that it may take, if the run's limit is not less."""


@dataclass(frozen=True)
class Result:
    """What became of a part."""

    part: Part
    status: Status
    reason: str
    """Why it failed or was skipped; what a reader should know of one that passed."""
    seconds: float = 0.0
    answers: tuple[Answer, ...] = ()
    details: str = ""
    """Where an error was raised, or where ranks were that gave no answer."""

    @property
    def ratio(self) -> float | None:
        """Seconds of our step by those of stock's, of the slowest rank."""
        return _ratio([answer.ours_s for answer in self.answers], [answer.stock_s for answer in self.answers])

    @property
    def memory_ratio(self) -> float | None:
        """The same of the bytes that a step allocates at most."""
        return _ratio([answer.ours_bytes for answer in self.answers], [answer.stock_bytes for answer in self.answers])


def _ratio(ours: list[Any], stock: list[Any]) -> float | None:
    if not ours or None in ours or None in stock or not max(stock):
        return None
    return float(max(ours) / max(stock))
