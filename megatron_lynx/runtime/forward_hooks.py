"""Forward hooks of modules see each forward once, and what they are shown is what forward computed.

    forward    [1] the half's code calls its modules, and torch their hooks, as without a plan
    replay     [2] the same code calls the same modules again, some of them on memos that hold no values: no hook is called

A hook that records activations, or counts tokens, would otherwise count twice, and record memory that was never written. A hook
that changes its module's arguments or results, in place or by what it returns, is refused by name in a half that is replayed:
without it [2] would make tensors of another forward.

Hooks of whole layers and of the model are outside of halves, and hear what they always heard. Hooks on gradients are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as everywhere

from megatron_lynx.runtime.refusals import hook_changes
from megatron_lynx.runtime.saved import tensors_in

Hook = Callable[..., Any]
Table = dict[int, Any]
"""A module's hooks of one kind, by number, in the order in which they are called."""


class ForwardHooks:
    """The forward hooks of one layer's modules, and those that are called for all modules. They come and go while training runs.

    `harmless`: whether a hook is known to change nothing, so that nobody need look.
    """

    def __init__(self, modules: Iterable[torch.nn.Module] = (), harmless: Callable[[Hook], bool] = lambda hook: False) -> None:
        modules = tuple(modules)
        self._before: tuple[Table, ...] = (
            everywhere._global_forward_pre_hooks,
            *(module._forward_pre_hooks for module in modules),
        )
        self._behind: tuple[Table, ...] = (everywhere._global_forward_hooks, *(module._forward_hooks for module in modules))
        self._tables = (*self._before, *self._behind) if modules else ()
        self._is_harmless = harmless
        self._harmless: set[int] = set()
        """Numbers of such hooks. torch gives each hook one of its own."""

    def watched(self, half: str) -> AbstractContextManager[None]:
        """Inside, a hook that changes what is computed is refused. `half`: its name, for the error."""
        return self._watching(half) if any(self._tables) and self._unknown() else nullcontext()

    def silent(self) -> AbstractContextManager[None]:
        """Inside, none is called."""
        return _emptied(self._tables) if any(self._tables) else nullcontext()

    def _unknown(self) -> bool:
        """Whether there are hooks that are not known to be harmless."""
        new = [(number, hook) for table in self._tables for number, hook in table.items() if number not in self._harmless]
        self._harmless.update(number for number, hook in new if self._is_harmless(hook))
        return any(number not in self._harmless for number, _ in new)

    @contextmanager
    def _watching(self, half: str) -> Iterator[None]:
        watched = [
            (table, number, hook, _WatchedHook(hook, half, behind=behind))
            for tables, behind in ((self._before, False), (self._behind, True))
            for table in tables
            for number, hook in table.items()
            if number not in self._harmless
        ]
        for table, number, _, ours in watched:
            table[number] = ours
        try:
            yield
        finally:
            for table, number, hook, ours in watched:
                if table.get(number) is ours:  # it may have removed itself
                    table[number] = hook


class _WatchedHook:
    """A hook that may change nothing. `behind`: it is called with what a module returned."""

    def __init__(self, hook: Hook, half: str, *, behind: bool) -> None:
        self._hook = hook
        self._half = half
        self._behind = behind

    def __call__(self, module: torch.nn.Module, *given: Any) -> Any:
        tensors = tensors_in(given)
        versions = [tensor._version for tensor in tensors]
        answer = self._hook(module, *given)
        replaces = answer is not None and not _same(tensors_in(answer), tensors_in(given[-1] if self._behind else given))
        if replaces or versions != [tensor._version for tensor in tensors]:
            raise hook_changes(self._half, type(module).__name__, getattr(self._hook, "__qualname__", repr(self._hook)))
        return answer


def _same(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(this is that for this, that in zip(these, those, strict=True))


@contextmanager
def _emptied(tables: Iterable[Table]) -> Iterator[None]:
    """Inside, the tables are empty, and still the same objects: handles of hooks know them."""
    full = [(table, dict(table)) for table in tables if table]
    for table, _ in full:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in full:
            table.clear()
            table.update(hooks)


NO_HOOKS = ForwardHooks()
