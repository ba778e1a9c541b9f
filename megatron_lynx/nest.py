"""Finds and replaces objects in nests of tuples, lists and dicts, which is what calls take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def all_in(kind: type[T], value: Any) -> Iterator[T]:
    """Every object of a `kind` in a nest, in order."""
    found: list[T] = []
    _add(kind, value, found)
    return iter(found)


def _add(kind: type[T], value: Any, found: list[T]) -> None:
    if isinstance(value, kind):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for part in value:
            _add(kind, part, found)
    elif isinstance(value, dict):
        for part in value.values():
            _add(kind, part, found)


def map_nest(kind: type[T], function: Callable[[T], Any], value: Any) -> Any:
    """A copy of the nest in which `function` has replaced every `kind`. Anything else is passed on as it is."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_nest(kind, function, part) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_nest(kind, function, part) for part in value)
    if isinstance(value, dict):
        return {key: map_nest(kind, function, part) for key, part in value.items()}
    return value
