"""Finds and replaces objects in nested tuples, lists and dicts, such as a call's arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def all_in(kind: type[T], value: Any) -> list[T]:
    if isinstance(value, kind):
        return [value]
    objects: list[T] = []
    if isinstance(value, (tuple, list, dict)):
        _add_from(value, kind, objects)
    return objects


def first_in(kind: type[T], value: Any) -> T | None:
    return value if isinstance(value, kind) else next(iter(all_in(kind, value)), None)


def _add_from(nest: Any, kind: type[T], objects: list[T]) -> None:
    for part in nest.values() if isinstance(nest, dict) else nest:
        if part is None:  # fast path: most arguments of Megatron's layers are None
            continue
        if isinstance(part, kind):
            objects.append(part)
        elif isinstance(part, (tuple, list, dict)):
            _add_from(part, kind, objects)


def map_nest(kind: type[T], function: Callable[[T], Any], value: Any) -> Any:
    """A copy of the nest in which `function` has replaced every `kind`. Other objects are kept."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, (tuple, list)):
        parts: Any = [part if part is None else map_nest(kind, function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: part if part is None else map_nest(kind, function, part) for key, part in value.items()}
    return value
