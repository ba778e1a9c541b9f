"""Names of items, windows and gathers in a plan. What is none is answered with those that are."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from megatron_lynx.items import HALVES
from megatron_lynx.schedule.windows import ON_DEMAND, PATTERN, RECV_BACKWARD

GATHER_PATTERN = r"(on_demand|bwd\.(attention|mlp)\.\d(\+\d+)?)"

_BACKWARD = tuple(f"bwd.{half}.{ordinal}{above}" for ordinal in range(3) for half in HALVES for above in ("", "+1"))
_FORWARD = tuple(f"fwd.{half}.{ordinal}" for ordinal in range(2) for half in HALVES)


def _matching(pattern: str, examples: tuple[str, ...]) -> AfterValidator:
    """Text must match `pattern`; what does not is answered with names of that kind, not with the pattern."""
    expected = ", ".join(repr(name) for name in examples)

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise PydanticCustomError("literal_error", "no such name", {"expected": expected})
        return text

    return AfterValidator(check)


WindowName = Annotated[
    str,
    _matching(PATTERN, (ON_DEMAND, RECV_BACKWARD, *_BACKWARD, *_FORWARD)),
    WithJsonSchema({"type": "string", "pattern": f"^{PATTERN}$"}),
]
GatherName = Annotated[
    str,
    _matching(GATHER_PATTERN, (ON_DEMAND, *_BACKWARD)),
    WithJsonSchema({"type": "string", "pattern": f"^{GATHER_PATTERN}$"}),
]
ItemName = Literal[
    "input_layernorm",
    "linear_qkv",
    "rotary",
    "core_attention",
    "linear_proj",
    "attention_bda",
    "pre_mlp_layernorm",
    "linear_fc1",
    "activation",
    "linear_fc2",
    "mlp_bda",
]
