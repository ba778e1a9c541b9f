"""A range of layers, as a plan writes it: `3` or `3-8`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from megatron_lynx.validation import Part

MOST_LAYERS = 1_000
"""The most layers of a model: with a mistyped number, checks would take too long."""


class LayerRange(Part):
    """Layers `first` to `last`, both included, by Megatron's global layer number (from 1). Written `3` or `3-8`."""

    first: int = Field(ge=1, le=MOST_LAYERS)
    last: int = Field(ge=1, le=MOST_LAYERS)

    @model_validator(mode="after")
    def _ordered(self) -> LayerRange:
        if self.last < self.first:
            raise ValueError(f"{self} ends before it begins (write the smaller layer number first)")
        return self

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

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
        return {"first": int(match[1]), "last": int(match[2])}
    if isinstance(value, str):
        raise ValueError(f"{value!r} is no layer range, write one layer (3) or a range (3-8)")
    return value


def _write_range(value: LayerRange) -> int | str:
    return value.first if value.first == value.last else str(value)


Layers = Annotated[
    LayerRange,
    BeforeValidator(_read_range, json_schema_input_type=int | str),
    PlainSerializer(_write_range, return_type=int | str),
]
"""A `LayerRange` that is read and written as one number or as text."""
