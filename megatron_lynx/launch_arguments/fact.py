"""A fact about the job of a launch, and the flag that it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fact:
    """One value of the job."""

    place: str
    """Where it stands in a job file: `model.layers`."""
    value: Any
    origin: str
    """The flag that says it, or how it follows from other flags."""


def as_job_data(facts: Iterable[Fact]) -> dict[str, Any]:
    """The facts as a job file would have them."""
    data: dict[str, Any] = {}
    for fact in facts:
        *path, last = fact.place.split(".")
        inside = data
        for key in path:
            inside = inside.setdefault(key, {})
        inside[last] = fact.value
    return data
