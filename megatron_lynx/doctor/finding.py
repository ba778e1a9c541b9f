"""A finding of `megatron-lynx doctor`: one fact, its cost, and what to set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "note", "slows", "defeats"]
"""good: as it should be; note: worth knowing; slows: overlap gains less; defeats: plans are refused or hide nothing, Megatron
stops,
or stock's gradients are wrong.
"""


@dataclass(frozen=True)
class Finding:
    topic: str
    level: Level
    found: str
    costs: str = ""
    todo: str = ""
