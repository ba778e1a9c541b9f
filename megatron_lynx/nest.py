"""Finds and replaces objects in nests of tuples, lists and dicts, which is what calls take and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def all_in(kind: type[T], value: Any) -> list[T]:
    """Every object of a `kind` in a nest, in order."""
    if isinstance(value, kind):
        return [value]
    found: list[T] = []
    if isinstance(value, (tuple, list, dict)):
        _add_from(value, kind, found)
    return found


def first_in(kind: type[T], value: Any) -> T | None:
    """The first object of a `kind` in a nest, if there is one."""
    return value if isinstance(value, kind) else next(iter(all_in(kind, value)), None)


def _add_from(nest: Any, kind: type[T], found: list[T]) -> None:
    for part in nest.values() if isinstance(nest, dict) else nest:
        if part is None:  # most of what Megatron's layers are called with, and a quick answer
            continue
        if isinstance(part, kind):
            found.append(part)
        elif isinstance(part, (tuple, list, dict)):
            _add_from(part, kind, found)


def map_nest(kind: type[T], function: Callable[[T], Any], value: Any) -> Any:
    """A copy of the nest in which `function` has replaced every `kind`. Anything else is passed on as it is."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (tuple, list)):
        parts: Any = [part if part is None else map_nest(kind, function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: part if part is None else map_nest(kind, function, part) for key, part in value.items()}
    return value
