"""Price of one section of a layer under one choice of recomputed items."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lynx.anatomy import Section
from megatron_lynx.cost.communication import again_s, kept_gathers_bytes, under_way_s
from megatron_lynx.cost.memory import HalfMemory, half_memory
from megatron_lynx.cost.recompute import Checkpoint, recomputation_of
from megatron_lynx.profiler.profile import Profile


class Progress(NamedTuple):
    """Progress of a recomputation from its beginning to an item, or between two of them."""

    seconds: float
    bytes: int
    """Bytes live, including tensors kept to resume and a gathered input."""
    under_way_s: float = 0.0
    """Communication in flight when a checkpoint that runs ahead stops."""
    again_s: float = 0.0
    """Part of `seconds` that runs again on resuming: code between sites."""
    waits_s: float = 0.0
    """Waits for its communication, or for the gather of its input."""


@dataclass(frozen=True)
class PricedSection:
    memory: HalfMemory
    """Memory if recomputed on demand."""
    recompute_s: float = 0.0
    """Forward seconds of all that recomputation runs, code on the way included."""
    flops: int = 0
    """FLOPs of the recomputed items."""
    communicates_s: float = 0.0
    """Exposed communication of a recomputed checkpoint."""
    gathered_bytes: int = 0
    """Buffer of an input gathered once for recomputation and backward."""
    stops: Mapping[str, Progress] = field(default_factory=dict)
    """By item before which recomputation can stop; for a checkpoint recomputed in parts, at which it stops, last first."""


def priced(
    profile: Profile,
    section: Section,
    recompute: Collection[str],
    checkpoint: Checkpoint | None = None,
    less_in_hand_bytes: int = 0,
) -> PricedSection:
    """Price the recomputation of these items. `checkpoint`: of these items, saving at most its input."""
    if checkpoint is not None and (checkpoint.ahead_to is not None or checkpoint.rest_in_wait):
        return _in_parts(profile, section, recompute, checkpoint, less_in_hand_bytes)
    costs, message_bytes = profile.of(section), profile.message_bytes
    recomputed = recomputation_of(section, costs.tensors, recompute, whole=checkpoint is not None and checkpoint.feeds)
    gathered_bytes = kept_bytes = 0
    communicates_s, stops = 0.0, dict[str, Progress]()
    if checkpoint is not None:
        communicates_s = again_s(profile, section, recomputed.runs)
    else:
        gathered_bytes = profile.gathered_input(message_bytes) if gathers(profile, section, recompute) else 0
        kept_bytes = kept_gathers_bytes(profile, section, recompute, message_bytes)
        for stop in section.stops:
            before = (item for item in recomputed.runs if section.index(item) < section.index(stop))
            stops[stop] = Progress(
                sum(costs.items[item].forward_s for item in before), recomputed.there_bytes[stop] + gathered_bytes
            )
    return PricedSection(
        half_memory(section, profile, recomputed, checkpoint, less_in_hand_bytes, gathered_bytes, kept_bytes),
        sum(costs.items[item].forward_s for item in recomputed.runs),
        sum(costs.items[item].flops for item in recomputed.runs if item in recompute),
        communicates_s,
        gathered_bytes,
        stops,
    )


def _in_parts(
    profile: Profile, section: Section, recompute: Collection[str], checkpoint: Checkpoint, less_in_hand_bytes: int
) -> PricedSection:
    """Price a checkpoint recomputed in two parts: to an item, during the backward of the layer above or at the start of its
    backward, and the rest after that. Rows of tokens are counted elsewhere (`stage_memory.dispatched_bytes`)."""
    price = priced(profile, section, recompute, Checkpoint(checkpoint.feeds, checkpoint.fed), less_in_hand_bytes)
    item = checkpoint.ahead_to or section.last_communicating
    assert item is not None, f"nothing of {section.name} communicates"
    if item == section.residual:
        return dataclasses.replace(price, memory=_from_above(price.memory, price.memory.regenerated, checkpoint))
    places = (item, *((section.column_parallel,) if checkpoint.gathers_ahead else ()))
    stops = {place: _begun(profile, section, recompute, checkpoint, place) for place in places}
    exposed_s = price.communicates_s - sum(progress.under_way_s for progress in stops.values())
    stops[item] = stops[item]._replace(waits_s=exposed_s)
    memory = price.memory
    if checkpoint.ahead_to is not None:
        memory = _from_above(memory, max(progress.bytes for progress in stops.values()), checkpoint)
    return dataclasses.replace(price, memory=memory, stops=stops)


def _begun(profile: Profile, section: Section, recompute: Collection[str], checkpoint: Checkpoint, item: str) -> Progress:
    """Return the progress at an item: before it while its input is gathered, else after it."""
    costs, index, gathers = profile.of(section), section.index(item), item == section.gathered
    stop = item if gathers or section.exchanges else section.names[index + 1]
    recomputed = recomputation_of(section, costs.tensors, recompute, whole=checkpoint.feeds, stops=(stop,))
    before = [run for run in recomputed.runs if section.index(run) < index + (not gathers)]
    held_bytes = recomputed.there_bytes[stop] + (costs.input_bytes if checkpoint.fed or (checkpoint.feeds and not gathers) else 0)
    scatters = profile.shape.sequence_parallel and not section.exchanges
    travels = profile.gathered_input(profile.message_bytes) if gathers else profile.message_bytes if scatters else 0
    return Progress(
        sum(costs.items[run].forward_s for run in before),
        held_bytes + travels,
        under_way_s(profile, section, item, gathers=gathers),
        sum(costs.items[run].forward_s for run in before if run in section.code),
    )


def _from_above(memory: HalfMemory, begun_bytes: int, checkpoint: Checkpoint) -> HalfMemory:
    """Add the bytes recomputed in the layer above, whose attention half precedes the MLP half."""
    nearest, *_ = memory.ahead
    before = (nearest, nearest, begun_bytes, begun_bytes) if checkpoint.feeds else (begun_bytes, begun_bytes, 0, 0)
    return dataclasses.replace(memory, ahead=before)


def gathers(profile: Profile, section: Section, recompute: Collection[str]) -> bool:
    """Whether these items include the GEMM whose input is gathered once."""
    return profile.shape.sequence_parallel and section.gathered in recompute
