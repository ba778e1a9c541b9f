"""The machine a job runs on. The catalogue of GPU clusters comes with the planner; the testbed is described here too."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Cluster(BaseModel):
    """Devices and the links between them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    device: Literal["cpu", "cuda"]
    memory_gib: float = Field(gt=0)
    """Memory of one device."""
    link_mbit_per_s: float | None = Field(default=None, gt=0)
    """Testbed only: the rate to which the link between the two emulated hosts is shaped; none leaves it unshaped."""
