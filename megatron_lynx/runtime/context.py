"""A replay must run under what its record ran under: everything that a call depends on and that is not in its arguments.

    record    capture() ── a value that later calls do not change
    replay    as_captured(value):  [what it was then] ... [what it was before the replay]

Random numbers are a matter of their own (`rng`): they move on with each draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor


class Context(Protocol):
    """Something that a replay must find as its record did, and leave as it found it."""

    def capture(self) -> Any:
        """What it is now, as a value that later calls do not change."""

    def as_captured(self, captured: Any) -> AbstractContextManager[Any]:
        """Inside it is what it was then; afterwards it is what it was before."""


class SiteState(Context, Protocol):
    """What one site keeps from call to call beside its parameters: scales of FP8, and quantized copies of weights."""

    def lasting(self) -> Iterable[Tensor]:
        """Tensors that outlive a call. A node of autograd may save them; they are no micro-batch's own."""


class Autocast:
    """Torch's autocast, which is on in Megatron's forward step and off in its backward (rule R12)."""

    def capture(self) -> tuple[Any, ...]:
        """(device type, dtype or None where it is off, cache) for every device type that a layer may run on."""
        cache = torch.is_autocast_cache_enabled()
        return tuple(
            [
                (kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None, cache)
                for kind in ("cuda", "cpu")
            ]
        )

    def as_captured(self, captured: tuple[Any, ...]) -> AbstractContextManager[Any]:
        now = self.capture()
        if now == captured:
            return nullcontext()
        stack = ExitStack()
        for one, other in zip(captured, now, strict=True):
            if one != other:
                kind, dtype, cache = one
                stack.enter_context(torch.autocast(kind, enabled=dtype is not None, dtype=dtype, cache_enabled=cache))
        return stack


class Surroundings:
    """All contexts of a run as one."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = tuple(contexts)

    def capture(self) -> tuple[Any, ...]:
        return tuple([context.capture() for context in self._contexts])

    def as_captured(self, captured: tuple[Any, ...]) -> AbstractContextManager[Any]:
        if len(self._contexts) == 1:
            return self._contexts[0].as_captured(captured[0])
        return self._all_as_captured(captured)

    @contextmanager
    def _all_as_captured(self, captured: tuple[Any, ...]) -> Iterator[None]:
        with ExitStack() as stack:
            for context, then in zip(self._contexts, captured, strict=True):
                stack.enter_context(context.as_captured(then))
            yield
