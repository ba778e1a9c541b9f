"""A replay must run under what its record ran under: all that a call depends on and that is not in its arguments.

    record    capture() ── a value that later calls do not change
    replay    as_captured(value):  [what it was then] ... [what it was before the replay]

Random numbers move on with each draw, so their state is restored in the middle of a replay, too:

    forward   ──[S0]── site ──[S1]── kept site ──[S2]── site ──
                 │                               │
    replay    restore(S0)    …    the kept site is skipped: restore(S2)    …    restore what was before the replay

A half that cannot draw, because nothing in it drops out, has none of this (`HalfPolicy.may_draw`). What a random state is depends
on who trains: `TorchRandom` knows torch's default generators; Megatron's tracker is added by `apply` (rule R13: a copy of its
dict, and the name of the state in use).
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
    """Something that a replay must find as its record did, and leave as it found it."""

    def capture(self) -> Any:
        """The present value, which later calls do not change."""

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
    """All contexts of a run as one. Inside, no default hooks on saved tensors are on: records begin without any (`refusals`), and
    neither a recomputation nor a weight gradient saves anything for backward."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = tuple(contexts)

    def capture(self) -> tuple[Any, ...]:
        return tuple([context.capture() for context in self._contexts])

    def as_captured(self, captured: tuple[Any, ...]) -> AbstractContextManager[Any]:
        contexts = [context.as_captured(then) for context, then in zip(self._contexts, captured, strict=True)]
        changing = [one for one in (without_default_hooks(), *contexts) if type(one) is not nullcontext]
        return _together(changing) if changing else nullcontext()


@contextmanager
def _together(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class RandomSource(Protocol):
    """Everything that draws random numbers in a layer."""

    def capture(self) -> Any:
        """The present state, as a value that later draws do not change."""

    def restore(self, state: Any) -> None:
        """Make `state` the present one. The same state can be restored again."""

    def same(self, one: Any, other: Any) -> bool:
        """Whether nothing was drawn between two captures."""


class TorchRandom:
    """The default generators of torch that code on a device draws from: the CPU's, and on CUDA that of the device."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or present_device()

    def capture(self) -> tuple[Tensor, ...]:
        return self._device.random_states()

    def restore(self, state: tuple[Tensor, ...]) -> None:
        self._device.restore_random_states(state)

    def same(self, one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
        return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def unmarked(objects: Iterable[object], marks: Iterable[dict[str, Any]] = ()) -> Iterator[None]:
    """What is put on these objects inside is gone behind it, and what was there is there again. `marks`: what is on them at the
    beginning instead, where that is given."""
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
    """Inside, numbers are drawn from `state` on; what is drawn is undone at the end."""
    before = source.capture()
    try:
        source.restore(state)
        yield
    finally:
        source.restore(before)
