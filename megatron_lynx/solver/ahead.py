"""Checkpointed layers whose communication begins while the layer above still runs backward.

    moments    mlp(5) [A]               attention(5) [A]                              mlp(4) [A]
    held       mlp(5), attention(5)     attention(5), what layer 4 has begun          mlp(4), attention(4)

A layer begins ahead if this saves time and the second moment holds no more than the third. The peak then stays the same, whatever
the layer above keeps, so the solver has no choice to make. A gather before a reduction meets this condition. If the second moment
holds more, the lowest layers may still begin ahead, because less is held when backward reaches them (`Stages.beginning_ahead`).
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import Section
from megatron_lynx.cost.communication import before_core_s, behind_gather_s
from megatron_lynx.cost.memory import BEGINS, HalfMemory
from megatron_lynx.cost.recompute import Checkpoint
from megatron_lynx.cost.section import PricedSection, Prices
from megatron_lynx.fp8_recipes import gathers_once
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.timetable import ahead_to, may_gather_ahead

Layer = tuple[Checkpoint | None, Checkpoint | None]
"""Checkpoints of the attention half and the MLP half of a layer; None if a half is not checkpointed."""


def begun_ahead(prices: Prices, sections: tuple[Section, Section], layer: Layer, *, anyway: bool = False) -> Layer:
    """Return the layer with its communication begun ahead if this saves time and memory allows it; otherwise return it unchanged.

    sections: of both halves. The layer above has the same sections.
    anyway: ignore memory.
    """
    best_layer, most_s = layer, 0.0
    for ahead in _ways(prices.profile, sections, layer):
        halves = ((_price(prices, *half), *half) for half in zip(sections, ahead, strict=True))
        seconds = sum(spared_s(prices.profile, *half, sections) for half in halves)
        if seconds > most_s and (anyway or _takes_no_memory(prices, sections, layer, ahead)):
            best_layer, most_s = ahead, seconds
    return best_layer


def _ways(profile: Profile, sections: tuple[Section, Section], layer: Layer) -> Iterator[Layer]:
    """Yield the layer with a dispatch or a reduction ahead, then with the gather before it ahead as well if possible."""
    experts, shape = sections[1].exchanges, profile.shape
    first, second = (
        one and one._replace(ahead_to=ahead_to(section, experts=experts, feeds=one.feeds))
        for section, one in zip(sections, layer, strict=True)
    )
    yield first, second
    gathers = shape.sequence_parallel and shape.tensor > 1 and gathers_once(shape.fp8)
    if gathers and first is not None and may_gather_ahead(sections[0], experts=experts, feeds=first.feeds):
        yield first._replace(gathers_ahead=True), second


def _takes_no_memory(prices: Prices, sections: tuple[Section, Section], layer: Layer, ahead: Layer) -> bool:
    above, *_ = (_price(prices, *half).memory for half in zip(sections, layer, strict=True))
    attention, mlp = (_price(prices, *half).memory for half in zip(sections, ahead, strict=True))
    return _at(above, 0) + _at(attention, 4) + _at(mlp, 2) <= _at(mlp, 0) + _at(attention, 2)


def spared_s(
    profile: Profile, price: PricedSection, section: Section, checkpoint: Checkpoint | None, layer: tuple[Section, Section]
) -> float:
    """Return the seconds that a checkpoint saves because its communication runs during the attention backward of the layer above.

    Tokens travel during that whole attention backward. With sequence parallelism a reduction travels between two gathers. After a
    gather, communication starts at the core attention.

    layer: the sections of its own layer, and of the layer above.
    """
    if checkpoint is None or checkpoint.ahead_to is None or not price.stops:
        return 0.0
    attention, mlp = layer
    between_gathers = profile.shape.sequence_parallel and not mlp.exchanges
    computes_s = behind_gather_s(profile, attention) if between_gathers else profile.of(attention).backward_s
    before_s = before_core_s(profile, attention) if checkpoint.gathers_ahead else 0.0
    return sum(
        min(begun.under_way_s / profile.interference, computes_s - before_s if item == checkpoint.ahead_to else before_s)
        - begun.again_s
        for item, begun in price.stops.items()
    )


def _price(prices: Prices, section: Section, checkpoint: Checkpoint | None) -> PricedSection:
    return prices.of(section, checkpoint.items(section) if checkpoint else (), checkpoint)


def _at(memory: HalfMemory, before: int) -> int:
    """Bytes that a half holds this many moments before its backward begins."""
    return memory.columns[BEGINS - before]
