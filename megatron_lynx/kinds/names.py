"""Types for names in files: of items, and of kinds; a wrong one is answered with those that exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from megatron_lynx.kinds.sections import all_items, kind_names


def _one_of(names: Callable[[], tuple[str, ...]]) -> AfterValidator:
    """Text must be one of these names; asked when it is checked, so that kinds may still be added."""

    def check(text: str) -> str:
        if text not in names():
            expected = ", ".join(repr(name) for name in names()) or "nothing: there are no such kinds"
            raise PydanticCustomError("literal_error", "no such name", {"expected": expected})
        return text

    return AfterValidator(check)


ItemName = Annotated[str, _one_of(all_items), WithJsonSchema({"enum": list(all_items()), "type": "string"})]
"""Every item that plan files know."""

KindName = Annotated[str, _one_of(kind_names), WithJsonSchema({"type": "string"})]
"""A kind of what fills a half that no key of its own speaks of."""
