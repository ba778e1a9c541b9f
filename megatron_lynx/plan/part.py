"""Base of a plan's parts: they cannot be changed after reading, and refuse keys that this release does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
