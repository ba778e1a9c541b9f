"""Calls users' forward hooks once per forward, and refuses those that change tensors.

    forward      [1] modules call their hooks as without a plan
    recompute    [2] the same code calls the same modules, some on memos without values: no hook is called

Otherwise a hook that counts tokens would count twice, and one that records activations would read uninitialised memory. A hook
that changes arguments or results is refused by name in a recomputed half: without it [2] would recompute other tensors.

Hooks of whole layers and of the model are outside of halves and run as usual; gradient hooks are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules import module as everywhere

from megatron_lynx.runtime.refusals import HOOK_CHANGES
from megatron_lynx.runtime.saved import tensors_in

Hook = Callable[..., Any]
Table = dict[int, Any]
"""A module's hooks of one kind, by id, in calling order."""


class ForwardHooks:
    """Forward hooks of one layer's modules, and global ones. `harmless`: whether a hook is known to change nothing."""

    def __init__(self, modules: Iterable[torch.nn.Module] = (), harmless: Callable[[Hook], bool] = lambda hook: False) -> None:
        modules = tuple(modules)
        before: tuple[Table, ...] = (
            everywhere._global_forward_pre_hooks,
            *(module._forward_pre_hooks for module in modules),
        )
        after: tuple[Table, ...] = (everywhere._global_forward_hooks, *(module._forward_hooks for module in modules))
        self._tables = (*before, *after) if modules else ()
        self._after = after
        self._is_harmless = harmless
        self._harmless: set[int] = set()
        """Ids of harmless hooks. torch gives each hook its own id."""

    def watched(self, half: str) -> AbstractContextManager[None]:
        """Refuse hooks that change tensors, inside the context. `half`: its name, for the error."""
        if not any(self._tables):
            return nullcontext()
        new = [(number, hook) for table in self._tables for number, hook in table.items() if number not in self._harmless]
        self._harmless.update(number for number, hook in new if self._is_harmless(hook))
        return self._watching(half) if any(number not in self._harmless for number, _ in new) else nullcontext()

    def silent(self) -> AbstractContextManager[None]:
        """Call no hooks inside the context."""
        return _emptied(self._tables) if any(self._tables) else nullcontext()

    @contextmanager
    def _watching(self, half: str) -> Iterator[None]:
        watched = [
            (table, number, hook, _refusing(hook, half, after=any(table is one for one in self._after)))
            for table in self._tables
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


def _refusing(hook: Hook, half: str, *, after: bool) -> Hook:
    """Wrap a hook that must not change tensors. `after`: the hook gets the module's output."""

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
def _emptied(tables: Iterable[Table]) -> Iterator[None]:
    """Empty the tables inside, in place: hook handles refer to them."""
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
