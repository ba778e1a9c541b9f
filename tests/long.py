"""What `make test` leaves to `make long`: combinations of things that each of its own cases holds in another combination."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

MODELS = ("gpt", "llama")
"""With biases, dropout and as many heads of keys as of queries; and without, with gated activations and grouped queries."""


def long(*cases: Any) -> list[Any]:
    """Cases that only `make long` runs: values of one parameter, or tuples of those of several."""
    cases_of_several = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.long) for case in cases_of_several]


def with_models(
    layouts: Iterable[Any], combined: Collection[str] = (), ids: Callable[[Any], str] | None = None
) -> pytest.MarkDecorator:
    """`layout` and `like`: every layout with one model after the other in `make test`, and with the other one in `make long`.

    `combined`: layouts that others of them contain, which are left to `make long` with both.
    """
    pairs = [
        pytest.param(layout, like, marks=[pytest.mark.long] if (at + turn) % 2 or layout in combined else [])
        for at, layout in enumerate(layouts)
        for turn, like in enumerate(MODELS)
    ]
    return pytest.mark.parametrize(("layout", "like"), pairs, ids=ids)
