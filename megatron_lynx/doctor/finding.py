"""What the doctor found: one fact each, what it costs, what to set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "note", "slows", "defeats"]
"""As it should be; worth knowing; overlap works, and is worth less; a plan refuses to train, or hides nothing."""


@dataclass(frozen=True)
class Finding:
    """One fact about software, machine or launch."""

    topic: str
    level: Level
    found: str
    costs: str = ""
    todo: str = ""
