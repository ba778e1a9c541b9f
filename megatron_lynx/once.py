"""Methods whose answers an unchanging object keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def once(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a method of hashable arguments: each answer is worked out once for each object."""
    name = f"{method.__name__} by arguments"

    @wraps(method)
    def known(self: S, /, *given: P.args, **named: P.kwargs) -> T:
        answers: dict[Any, T] = vars(self).setdefault(name, {})
        asked = given, *named.items()
        if asked not in answers:
            answers[asked] = method(self, *given, **named)
        return answers[asked]

    return known
