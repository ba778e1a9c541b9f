"""Finds and replaces objects in nests of tuples, lists and dicts, which is what calls take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def all_in(kind: type[T], value: Any) -> Iterator[T]:
    """Every object of a `kind` in a nest, in order."""
    found: list[T] = []
    _add(kind, (value,), found)
    return iter(found)


def _add(kind: type[T], parts: Iterable[Any], found: list[T]) -> None:
    for part in parts:
        if part is None:  # most of what Megatron's layers are called with, and a quick answer
            continue
        if isinstance(part, kind):
            found.append(part)
        elif isinstance(part, (tuple, list)):
            _add(kind, part, found)
        elif isinstance(part, dict):
            _add(kind, part.values(), found)


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
