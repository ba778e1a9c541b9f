"""A range of layers, written in plans as `3`, `3-8` or `none`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from megatron_lynx.validation import Part

MOST_LAYERS = 1_000
"""Limit of a model's layers: with a mistyped number, checks would take too long."""


NO_LAYERS = (1, 0)
"""First and last of an empty range."""

NONE = "none"


class LayerRange(Part):
    """Layers `first` to `last`, both included, by Megatron's global layer number (from 1). Written `3` or `3-8`; an empty range
    is `none`, which is 1 to 0."""

    first: int = Field(ge=1, le=MOST_LAYERS)
    last: int = Field(ge=0, le=MOST_LAYERS)

    def _problems(self) -> Iterator[str]:
        if self.last < self.first and (self.first, self.last) != NO_LAYERS:
            yield f"{self} ends before it begins (write the smaller layer number first)"

    @classmethod
    def of(cls, layers: range) -> LayerRange:
        """The range of consecutive layers."""
        first, last = (layers[0], layers[-1]) if layers else NO_LAYERS
        return cls(first=first, last=last)

    def __str__(self) -> str:
        return str(_write_range(self))

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        return iter(range(self.first, self.last + 1))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.first <= layer <= self.last

    def __len__(self) -> int:
        return self.last - self.first + 1


def _read_range(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"first": value, "last": value}
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", value.strip())):
        first, last = int(match[1]), int(match[2])
        if (first, last) == NO_LAYERS:
            raise ValueError(f"{value} ends before it begins (write none where there are no layers)")
        return {"first": first, "last": last}
    if value == NONE:
        return dict(zip(("first", "last"), NO_LAYERS, strict=True))
    if isinstance(value, str):
        raise ValueError(f"{value!r} is no layer range, write one layer (3), a range (3-8), or none")
    return value


def _write_range(value: LayerRange) -> int | str:
    if (value.first, value.last) == NO_LAYERS:
        return NONE
    return value.first if value.first == value.last else f"{value.first}-{value.last}"


Layers = Annotated[
    LayerRange,
    BeforeValidator(_read_range, json_schema_input_type=int | str),
    PlainSerializer(_write_range, return_type=int | str),
]
"""A `LayerRange` that is read and written as one number or as text."""
