"""Restores for a recomputation everything that a half's call depends on beside its arguments.

    record       capture() ── a value that later calls do not change
    recompute    as_captured(value):  [the recorded value] ... [the value before]

Random state advances with each draw, so a recomputation also restores it where it skips a kept site:

    forward      ──[S0]── site ──[S1]── kept site ──[S2]── site ──
                    │                               │
    recompute    restore(S0)    …    kept site skipped: restore(S2)    …    restore the state before

A half that cannot draw has no random state (`HalfPolicy.may_draw`). `RandomSource` has torch's default generators; `apply` adds
Megatron's tracker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lynx.runtime.device import Device, present_device
from megatron_lynx.runtime.saved import without_default_hooks


class Context(Protocol):
    """A setting that is captured, and restored inside a context."""

    def capture(self) -> Any:
        """Return the present value, which later calls do not change."""

    def as_captured(self, captured: Any) -> AbstractContextManager[Any]:
        """Restore that value inside the context."""


class SiteState(Context, Protocol):
    """State of one site between calls: FP8 scales, and quantized copies of weights."""

    def lasting(self) -> Iterable[Tensor]:
        """Return tensors that outlive a call. Autograd nodes may save them."""


class Autocast:
    """torch.autocast: on in Megatron's forward step, off in its backward (rule R12)."""

    def capture(self) -> tuple[Any, ...]:
        """Return (device type, dtype or None if off, cache) for each device type of a layer."""
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
    """All contexts of a run as one. Default saved-tensor hooks are off inside: those of another half may be on."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = tuple(contexts)

    def capture(self) -> tuple[Any, ...]:
        return tuple([context.capture() for context in self._contexts])

    def as_captured(self, captured: tuple[Any, ...]) -> AbstractContextManager[Any]:
        contexts = [context.as_captured(then) for context, then in zip(self._contexts, captured, strict=True)]
        changing = [one for one in (without_default_hooks(), *contexts) if type(one) is not nullcontext]
        if not changing:
            return nullcontext()
        with ExitStack() as stack:
            for context in changing:
                stack.enter_context(context)
            return stack.pop_all()


class RandomSource:
    """The generators that layers draw from: torch's default ones of the CPU and, on CUDA, of the device."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or present_device()

    def capture(self) -> Any:
        """Return the present state, which later draws do not change."""
        return self._device.random_states()

    def restore(self, state: Any) -> None:
        """Set the state. It can be restored several times."""
        self._device.restore_random_states(state)

    def same(self, one: Any, other: Any) -> bool:
        """Return whether nothing was drawn between two captures."""
        return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def unmarked(objects: Iterable[object], marks: Iterable[dict[str, Any]] = ()) -> Iterator[None]:
    """Restore these objects' attributes at the end. `marks`: attributes that they begin with instead of the present ones."""
    before = [(vars(one), dict(vars(one))) for one in objects]
    try:
        for (present, _), other in zip(before, marks, strict=False):
            present.clear()
            present.update(other)
        yield
    finally:
        for present, then in before:
            present.clear()
            present.update(then)


@contextmanager
def drawing_from(source: RandomSource, state: Any) -> Iterator[None]:
    """Draw from `state` inside; restore the state before at the end."""
    before = source.capture()
    try:
        source.restore(state)
        yield
    finally:
        source.restore(before)
