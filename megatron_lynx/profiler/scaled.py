"""A profile whose passes take so many times longer: what a run corrects, when only the seconds of whole passes were measured."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

from megatron_lynx.anatomy import HALVES
from megatron_lynx.learned import Learned
from megatron_lynx.profiler.profile import LinkPoint, Profile

PartT = TypeVar("PartT", bound=BaseModel)


def as_learned(profile: Profile, learned: Learned | None) -> Profile:
    """The profile with what a run has taught, as a plan states it. None: the profile as it is."""
    return profile if learned is None else scaled(profile, learned.seconds)


def scaled(profile: Profile, times: float) -> Profile:
    """The same profile with all seconds of passes multiplied: items, ends of the model, collectives, exchanges, messages.

    As they are stay: copies from and to the host, host time (Python's), and the optimizer's update, which no profile has.
    """
    named = ((name, getattr(profile, name)) for name in (*HALVES, "experts", "embedding", "head"))
    parts = {name: _scaled(part, times) for name, part in named if part is not None}
    links = tuple(_link(point, times) for point in profile.links)
    return profile.model_copy(update={**parts, "links": links, "head_summand_s": times * profile.head_summand_s})


def _link(point: LinkPoint, times: float) -> LinkPoint:
    return point if point.kind == "host" else _scaled(point, times)


def _scaled(part: PartT, times: float) -> PartT:
    """Every field of seconds multiplied, those of items, too."""
    found: dict[str, object] = {name: times * value for name, value in part if name.endswith("_s") or name == "seconds"}
    if (items := getattr(part, "items", None)) is not None:
        found |= {"items": {name: _scaled(item, times) for name, item in items.items()}}
    return part.model_copy(update=found)
