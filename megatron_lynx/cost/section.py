"""One section of a layer, priced under one choice of replayed items: for the solver, which asks for every choice, for the
rehearsal of a plan, which has made its choices, and for the table of trade-offs.

    items of the section ──replay_of──> what runs, stays, is regenerated ──> seconds and FLOPs of the replay
                                                                         └─> memory of the half, a gathered input included
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lynx.anatomy import Section
from megatron_lynx.cost.communication import kept_gathers_bytes
from megatron_lynx.cost.memory import HalfMemory, half_memory
from megatron_lynx.cost.replay import replay_of
from megatron_lynx.profiler.profile import Profile


class Stop(NamedTuple):
    """How far a replay is that stops before an item."""

    seconds: float
    """What has run."""
    bytes: int
    """What is there of what it regenerates, and of what it remembers to go on. A gathered input is in it."""


@dataclass(frozen=True)
class PricedSection:
    """One micro-batch in one section whose items are replayed as chosen."""

    memory: HalfMemory
    """What it holds when it is replayed on demand."""
    replay_s: float = 0.0
    """Forward seconds of everything that the replay runs, code on the way included."""
    flops: int = 0
    """What the replayed items compute again."""
    gathered_bytes: int = 0
    """The buffer of an input that is gathered once, for the replay and for the backward behind it."""
    stops: Mapping[str, Stop] = field(default_factory=dict)
    """By item before which the replay can stop: how far it is then."""


def priced(profile: Profile, section: Section, replay: Collection[str]) -> PricedSection:
    """What it costs to replay these items of the section."""
    costs = profile.of(section)
    replayed = replay_of(section, costs.tensors, replay)
    gathered_bytes = profile.gathered_input(profile.message_bytes) if gathers(profile, section, replay) else 0
    stops = {
        stop: Stop(
            sum(costs.items[item].forward_s for item in replayed.runs if section.index(item) < section.index(stop)),
            replayed.there_bytes[stop] + gathered_bytes,
        )
        for stop in section.stops
    }
    exchanging = section.exchanges and profile.shape.expert > 1
    memory = half_memory(section, costs, replayed, gathered_bytes=gathered_bytes, exchanging=exchanging)
    if kept := kept_gathers_bytes(profile, section, replay, profile.message_bytes):
        memory = dataclasses.replace(memory, resident=memory.resident + kept)
    return PricedSection(
        memory,
        sum(costs.items[item].forward_s for item in replayed.runs),
        sum(costs.items[item].flops for item in replayed.runs if item in replay),
        gathered_bytes,
        stops,
    )


def gathers(profile: Profile, section: Section, replay: Collection[str]) -> bool:
    """Whether a replay of these items runs the GEMM whose input is gathered once."""
    return profile.shape.sequence_parallel and section.gathered in replay
