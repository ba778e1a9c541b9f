"""One section of a layer, priced under one choice of replayed items: for the solver, which asks for every choice, for the
rehearsal of a plan, which has made its choices, and for the table of trade-offs.

    items of the section ──replay_of──> what runs, stays, is regenerated ──> seconds and FLOPs of the replay
                                                                         └─> memory of the half, a gathered input included

What recomputation buys, for every set of replayed items worth looking at, is the front of bytes of one layer against seconds:

seconds │                    o full               It begins with nothing replayed. Balanced recomputation (norms and
        │             o                           the activation; Yuan et al., ATC '24) ends the flat stretch, before a GEMM
        │   balanced                              or the attention has to run again.
        │ o──o
        └─────────────────────── bytes saved
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from megatron_lynx.anatomy import Section
from megatron_lynx.cost.communication import again_s, gather_once_s, kept_gathers_bytes, under_way_s
from megatron_lynx.cost.memory import HalfMemory, half_memory
from megatron_lynx.cost.replay import Checkpoint, replay_of, sensible_choices
from megatron_lynx.profiler.profile import Profile


class Stop(NamedTuple):
    """How far a replay is that stops before an item."""

    seconds: float
    """What has run."""
    bytes: int
    """What is there of what it regenerates, and of what it remembers to go on. A gathered input is in it."""


class Begun(NamedTuple):
    """How far a checkpoint is when it has run ahead, and stops at an item."""

    seconds: float
    bytes: int
    """As `Stop` has it."""
    under_way_s: float
    """The part of what it communicates that is under way then."""
    again_s: float
    """What of that runs once more when it goes on: code between sites."""
    waits_s: float = 0.0
    """What has been waited for until then."""


@dataclass(frozen=True)
class PricedSection:
    """One micro-batch in one section whose items are replayed as chosen."""

    memory: HalfMemory
    """What it holds when it is replayed on demand."""
    replay_s: float = 0.0
    """Forward seconds of everything that the replay runs, code on the way included."""
    flops: int = 0
    """What the replayed items compute again."""
    communicates_s: float = 0.0
    """What a checkpoint's collectives and exchanges take as they run again, exposed as in a forward."""
    gathered_bytes: int = 0
    """The buffer of an input that is gathered once, for the replay and for the backward behind it."""
    stops: Mapping[str, Stop] = field(default_factory=dict)
    """By item before which the replay can stop: how far it is then."""
    begun: Mapping[str, Begun] = field(default_factory=dict)
    """Of a checkpoint that runs again in parts: by item at which it stops, the last one first."""


def priced(
    profile: Profile,
    section: Section,
    replay: Collection[str],
    checkpoint: Checkpoint | None = None,
    less_in_hand_bytes: int = 0,
) -> PricedSection:
    """What it costs to replay these items of the section. `checkpoint`: of one that keeps its input at most, whose items these
    are. `less_in_hand_bytes`: as `cost.memory.half_memory` has it."""
    costs = profile.of(section)
    feeds = checkpoint is not None and checkpoint.feeds
    if checkpoint is not None and (checkpoint.ahead_to is not None or checkpoint.goes_on):
        return _in_parts(profile, section, replay, checkpoint, less_in_hand_bytes)
    replayed = replay_of(section, costs.tensors, replay, whole=feeds)
    once = gathers(profile, section, replay) and checkpoint is None
    gathered_bytes = profile.gathered_input(profile.message_bytes) if once else 0
    stops = {
        stop: Stop(
            sum(costs.items[item].forward_s for item in replayed.runs if section.index(item) < section.index(stop)),
            replayed.there_bytes[stop] + gathered_bytes,
        )
        for stop in (section.stops if checkpoint is None else ())
    }
    exchanging = section.exchanges_in_windows and profile.shape.expert > 1
    memory = half_memory(
        section,
        costs,
        replayed,
        gathered_bytes=gathered_bytes,
        exchanging=exchanging,
        checkpoint=checkpoint,
        less_in_hand_bytes=less_in_hand_bytes,
    )
    kept = kept_gathers_bytes(profile, section, replay, profile.message_bytes) if checkpoint is None else 0
    if kept:
        memory = dataclasses.replace(memory, resident=memory.resident + kept)
    return PricedSection(
        memory,
        sum(costs.items[item].forward_s for item in replayed.runs),
        sum(costs.items[item].flops for item in replayed.runs if item in replay),
        0.0 if checkpoint is None else again_s(profile, section, replayed.runs),
        gathered_bytes,
        stops,
    )


def _in_parts(
    profile: Profile, section: Section, replay: Collection[str], checkpoint: Checkpoint, less_in_hand_bytes: int
) -> PricedSection:
    """A checkpoint that runs again in parts: as far as an item while the layer above runs backward, or where backward enters it,
    and the rest behind that. What a reduction makes is remembered until then, and what one reads that scatters, as it travels; a
    gathered input has a buffer of its own until the linear has read it. Rows of tokens are not counted here: those that are sent
    and those that arrive are in hand at every moment (`stage_memory.dispatched_bytes`)."""
    at_once = checkpoint._replace(ahead_to=None, gathers_ahead=False, goes_on=False)
    price = priced(profile, section, replay, at_once, less_in_hand_bytes)
    item = checkpoint.ahead_to or section.last_communicating
    assert item is not None, f"nothing of {section.name} communicates"
    if item == section.residual:
        return dataclasses.replace(price, memory=_from_above(price.memory, price.memory.regenerated, checkpoint))
    gathers = item == section.gathered
    begun = {item: _begun(profile, section, replay, checkpoint, item, gathers=gathers)}
    if checkpoint.gathers_ahead:
        begun[section.column_parallel] = _begun(profile, section, replay, checkpoint, section.column_parallel, gathers=True)
    exposed_s = price.communicates_s - sum(each.under_way_s for each in begun.values())
    begun[item] = begun[item]._replace(waits_s=exposed_s)
    memory = price.memory
    if checkpoint.ahead_to is not None:
        memory = _from_above(memory, max(each.bytes for each in begun.values()), checkpoint)
    return dataclasses.replace(price, memory=memory, begun=begun)


def _begun(
    profile: Profile, section: Section, replay: Collection[str], checkpoint: Checkpoint, item: str, *, gathers: bool = False
) -> Begun:
    """How far it is where it stops at an item. `gathers`: before it, while its input travels into a buffer; else behind it."""
    costs, index = profile.of(section), section.index(item)
    stop = item if gathers or section.exchanges else section.names[index + 1]
    replayed = replay_of(section, costs.tensors, replay, whole=checkpoint.feeds, stops=(stop,))
    before = [each for each in replayed.runs if section.index(each) < index + (not gathers)]
    there = replayed.there_bytes[stop] + (costs.input_bytes if checkpoint.fed or (checkpoint.feeds and not gathers) else 0)
    scatters = profile.shape.sequence_parallel and not section.exchanges
    travels = profile.gathered_input(profile.message_bytes) if gathers else profile.message_bytes if scatters else 0
    return Begun(
        sum(costs.items[each].forward_s for each in before),
        there + travels,
        under_way_s(profile, section, item, gathers=gathers),
        sum(costs.items[each].forward_s for each in before if each in section.code),
    )


def _from_above(memory: HalfMemory, begun_bytes: int, checkpoint: Checkpoint) -> HalfMemory:
    """With what is there of it while the attention half of the layer above runs backward: its MLP half comes behind that at
    once, its attention half behind the MLP half, for which all of it is there."""
    nearest, *_ = memory.ahead
    before = (nearest, nearest, begun_bytes, begun_bytes) if checkpoint.feeds else (begun_bytes, begun_bytes, 0, 0)
    return dataclasses.replace(memory, ahead=before)


def gathers(profile: Profile, section: Section, replay: Collection[str]) -> bool:
    """Whether a replay of these items runs the GEMM whose input is gathered once."""
    return profile.shape.sequence_parallel and section.gathered in replay


@dataclass(frozen=True)
class TradeOff:
    """A set of items that are replayed on demand: one layer, one micro-batch, one rank."""

    replay: tuple[str, ...]
    saved_bytes: int
    """How much less is held between forward and backward than if everything is kept."""
    replay_s: float


def pareto_front(profile: Profile) -> tuple[TradeOff, ...]:
    """Every trade-off that no other one beats in both, from nothing replayed to most bytes saved."""
    both = [
        TradeOff(first.replay + second.replay, first.saved_bytes + second.saved_bytes, first.replay_s + second.replay_s)
        for first, second in product(*(list(_trade_offs(profile, section)) for section in _sections(profile)))
    ]
    front: list[TradeOff] = []
    for one in sorted(both, key=lambda one: (one.replay_s, -one.saved_bytes, len(one.replay))):
        if not front or one.saved_bytes > front[-1].saved_bytes:
            front.append(one)
    return tuple(front)


def _sections(profile: Profile) -> tuple[Section, ...]:
    """What fills the halves of a layer: of one with experts, if there are any."""
    attention, mlp = profile.shape.halves.values()
    return attention, mlp if profile.shape.experts is None else profile.shape.experts.section


def _trade_offs(profile: Profile, section: Section) -> Iterator[TradeOff]:
    costs = profile.of(section)
    sliced, te = profile.shape.sequence_parallel, profile.shape.implementation == "transformer_engine"
    for replay in sensible_choices(section, costs.tensors, profile.shape.context, sequence_parallel=sliced, te=te):
        price, gathering = priced(profile, section, replay), gathers(profile, section, replay)
        gather_s = gather_once_s(profile, section, None, profile.message_bytes) if gathering else 0.0
        yield TradeOff(replay, costs.saved_bytes - price.memory.resident, price.replay_s + gather_s)
