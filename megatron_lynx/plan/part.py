"""Any part of a plan: never changed after it was read, and no key in it that this release does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
