"""Types for the names of items, windows and gathers in a plan; a wrong name is answered with those that exist."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from megatron_lynx.anatomy.address import GATHER_PATTERN, ON_DEMAND, RECV_BACKWARD, WAIT_PATTERN, examples
from megatron_lynx.anatomy.stretch import PLACE_PATTERN
from megatron_lynx.kinds.sections import ItemName

__all__ = ["GatherName", "ItemName", "PlaceName", "WaitName"]


def _matching(pattern: str, examples: tuple[str, ...]) -> AfterValidator:
    """Text must match `pattern`; what does not is answered with names of that kind, not with the pattern."""
    expected = ", ".join(repr(name) for name in examples)

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise PydanticCustomError("literal_error", "no such name", {"expected": expected})
        return text

    return AfterValidator(check)


PlaceName = Annotated[
    str,
    _matching(PLACE_PATTERN, (ON_DEMAND, RECV_BACKWARD, *examples("bwd"), *examples("fwd"))),
    WithJsonSchema({"type": "string", "pattern": f"^{PLACE_PATTERN}$"}),
]
GatherName = Annotated[
    str,
    _matching(GATHER_PATTERN, (ON_DEMAND, *examples("bwd"), *examples("fwd"))),
    WithJsonSchema({"type": "string", "pattern": f"^{GATHER_PATTERN}$"}),
]
WaitName = Annotated[
    str,
    _matching(WAIT_PATTERN, (RECV_BACKWARD, *examples("bwd"), *examples("fwd"))),
    WithJsonSchema({"type": "string", "pattern": f"^{WAIT_PATTERN}$"}),
]
