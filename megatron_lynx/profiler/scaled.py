"""Corrects a profile's seconds by a run: by kind of half, for collectives and exchanges, and for whole passes."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel

from megatron_lynx.anatomy import HALVES
from megatron_lynx.learned import Learned
from megatron_lynx.profiler.profile import ExpertHalf, LinkPoint, Profile

PartT = TypeVar("PartT", bound=BaseModel)


def as_learned(profile: Profile, learned: Learned | None) -> Profile:
    """Return the profile with a run's corrections; unchanged for None.

    Host copies, host time (Python's) and the optimizer's update, which profiles do not contain, stay as they are.
    """
    if learned is None:
        return profile
    times = learned.seconds
    found: dict[str, object] = {half: _scaled(getattr(profile, half), times * getattr(learned, half)) for half in HALVES}
    found |= {name: _scaled(getattr(profile, name), times) for name in ("embedding", "head")}
    if profile.experts is not None:
        found["experts"] = _experts(profile.experts, learned)
    links = tuple(_link(point, learned) for point in profile.links)
    return profile.model_copy(update={**found, "links": links, "head_summand_s": times * profile.head_summand_s})


def _link(point: LinkPoint, learned: Learned) -> LinkPoint:
    if point.kind == "host":
        return point
    return _scaled(point, learned.seconds * (1.0 if point.kind == "p2p" else learned.collectives))


def _experts(half: ExpertHalf, learned: Learned) -> ExpertHalf:
    collectives, exchanges = learned.seconds * learned.collectives, learned.seconds * learned.exchanges
    waits = {
        "exchange_s": exchanges * half.exchange_s,
        "cut_s": collectives * half.cut_s,
        "collective_s": collectives * half.collective_s,
    }
    return _scaled(half, learned.seconds * learned.experts).model_copy(update=waits)


def _scaled(part: PartT, times: float) -> PartT:
    """Return a part with every field of seconds multiplied, including those of items."""
    found: dict[str, object] = {name: times * value for name, value in part if name.endswith("_s") or name == "seconds"}
    if (items := getattr(part, "items", None)) is not None:
        found |= {"items": {name: _scaled(item, times) for name, item in items.items()}}
    return part.model_copy(update=found)
