"""A stand-in: what takes the place of a library's objects on a machine that lacks them, and can be taken away again.

undo = ExitStack()
replace(undo, torch.cuda, "synchronize", ignore)      as often as needed
return StandIn(undo)                                  .remove(): the identical objects are back, newest first
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

ABSENT = object()


class StandIn:
    """The active stand-in. `remove()` (or leaving the `with` block) restores every replaced object, newest first."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Restore the identical objects. A second call does nothing."""
        self._undo.close()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def replace(undo: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Set `owner.name` and remember how to put back what its own `__dict__` held, which may be nothing."""
    own = vars(owner).get(name, ABSENT)
    setattr(owner, name, new)
    if own is ABSENT:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, own)


def replace_entry(undo: ExitStack, mapping: MutableMapping[str, Any], key: str, new: Any) -> None:
    """The same for an entry of a mapping, such as `os.environ` or `sys.modules`."""
    before = mapping.get(key, ABSENT)
    mapping[key] = new
    if before is ABSENT:
        undo.callback(mapping.pop, key)
    else:
        undo.callback(mapping.__setitem__, key, before)


def ignore(*args: Any, **kwargs: Any) -> None:
    """Answers a request for which a CPU has nothing to do."""
