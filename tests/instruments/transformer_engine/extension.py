"""The file that Transformer Engine loads as `transformer_engine_torch`, in place of the compiled one.

Its own loader runs it, under that name. What the parts have is answered, any other name is unanswered.
"""

from __future__ import annotations

from typing import Any

from tests.instruments.transformer_engine import (
    blocks,
    enums,
    facts,
    float8,
    fp4,
    gemm,
    multi_tensor,
    normalization,
    packed,
    rope,
    softmax,
    userbuffers,
)
from tests.instruments.transformer_engine.unanswered import Unanswered

PARTS = (blocks, enums, facts, float8, fp4, gemm, multi_tensor, normalization, packed, rope, softmax, userbuffers)

globals().update({name: getattr(part, name) for part in PARTS for name in part.__all__})

PLUGINS = ("flash_attention", "get_attention_backend")
"""Names that plugins may add to the extension, and that it does not have itself."""


def __getattr__(name: str) -> Any:
    if name.startswith("__") or name in PLUGINS:
        raise AttributeError(name)
    return Unanswered(f"transformer_engine_torch.{name}")
