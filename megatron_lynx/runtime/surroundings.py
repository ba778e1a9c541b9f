"""Restores for a recomputation everything that a half's call depends on beside its arguments.

Random state advances with each draw, so a recomputation also restores it where it skips a kept site. `RandomSource` has torch's
default generators; `apply` adds Megatron's tracker.

Users' forward hooks are not called in a recomputation. One that changes arguments or results is refused by name in a recomputed
half. Hooks of whole layers and of the model are outside of halves and run as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.modules import module as everywhere

from megatron_lynx.runtime.device import Device, present_device
from megatron_lynx.runtime.refusals import HOOK_CHANGES
from megatron_lynx.runtime.saved import tensors_in, without_default_hooks


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
        return tuple([generator.get_state() for generator in self._device.generators])

    def restore(self, state: Any) -> None:
        for generator, then in zip(self._device.generators, state, strict=True):
            generator.set_state(then)

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


Hook = Callable[..., Any]
Table = dict[int, Hook]
"""A module's hooks of one kind, by id, in calling order."""


class ForwardHooks:
    """Forward hooks of one layer's modules, and global ones. `harmless`: whether a hook is known to change nothing."""

    def __init__(self, modules: Iterable[torch.nn.Module] = (), harmless: Callable[[Hook], bool] = lambda hook: False) -> None:
        modules, tables = tuple(modules), list[tuple[Table, bool]]()
        for name, after in (("forward_pre_hooks", False), ("forward_hooks", True)) if modules else ():
            tables.append((getattr(everywhere, f"_global_{name}"), after))
            tables += [(getattr(module, f"_{name}"), after) for module in modules]
        self._after = {id(table): after for table, after in tables}
        """By table, whether its hooks get the module's output."""
        self._tables = [table for table, _ in tables]
        self._is_harmless = harmless
        self._harmless: set[int] = set()
        """Ids of harmless hooks. torch gives each hook its own id."""

    def watched(self, half: str) -> AbstractContextManager[None]:
        """Refuse hooks that change tensors, inside the context. `half`: its name, for the error."""
        if not any(self._tables):
            return nullcontext()
        new = [(number, hook) for table in self._tables for number, hook in table.items() if number not in self._harmless]
        self._harmless.update(number for number, hook in new if self._is_harmless(hook))

        def refusing(table: Table) -> Table:
            after, known = self._after[id(table)], self._harmless
            return {number: hook if number in known else _refusing(hook, half, after=after) for number, hook in table.items()}

        return _replaced(self._tables, refusing) if any(number not in self._harmless for number, _ in new) else nullcontext()

    def silent(self) -> AbstractContextManager[None]:
        return _replaced(self._tables, lambda table: {}) if any(self._tables) else nullcontext()


def _refusing(hook: Hook, half: str, *, after: bool) -> Hook:
    def watched(module: torch.nn.Module, *given: Any) -> Any:
        tensors = tensors_in(given)
        versions = [tensor._version for tensor in tensors]
        answer = hook(module, *given)
        expected = tensors_in(given[-1] if after else given)
        replaces = answer is not None and [*map(id, tensors_in(answer))] != [*map(id, expected)]
        if replaces or versions != [tensor._version for tensor in tensors]:
            raise HOOK_CHANGES.of(half, module=type(module).__name__, hook=getattr(hook, "__qualname__", repr(hook)))
        return answer

    return watched


@contextmanager
def _replaced(tables: Iterable[Table], others: Callable[[Table], Table]) -> Iterator[None]:
    """Other hooks in these tables, in place: hook handles refer to them. A hook that removed itself inside stays removed."""
    changed = [(table, dict(table), others(table)) for table in tables if table]
    for table, _, instead in changed:
        table.clear()
        table.update(instead)
    try:
        yield
    finally:
        for table, before, instead in changed:
            left = {number: hook for number, hook in before.items() if number not in instead or number in table}
            left |= {number: hook for number, hook in table.items() if number not in before}
            table.clear()
            table.update(left)


NO_HOOKS = ForwardHooks()
