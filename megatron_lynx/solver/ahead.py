"""Whether what a checkpointed layer communicates begins ahead, while the layer above it runs backward.

    moments    mlp(5) [A]               attention(5) [A]                              mlp(4) [A]
    there      mlp(5), attention(5)     attention(5), what is begun of layer 4        mlp(4), attention(4)

It does where that spares seconds and the second moment is no fuller than the third, which comes in any case: then it takes no
memory, whatever the layer above keeps, and there is nothing to choose.
"""

from __future__ import annotations

from megatron_lynx.anatomy import Section
from megatron_lynx.cost.communication import behind_gather_s
from megatron_lynx.cost.memory import BEGINS, HalfMemory
from megatron_lynx.cost.prices import Prices
from megatron_lynx.cost.replay import Checkpoint
from megatron_lynx.cost.section import PricedSection
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.timetable import ahead_to

Layer = tuple[Checkpoint | None, Checkpoint | None]
"""What the attention half and the MLP half of a layer are as checkpoints; None: none."""


def begun_ahead(prices: Prices, sections: tuple[Section, Section], layer: Layer) -> Layer:
    """The same layer, and what it communicates begins ahead if that is worth it. `sections`: what fills its halves, and those of
    the layer above."""
    experts = sections[1].exchanges
    ahead = tuple(
        one and one._replace(ahead_to=ahead_to(section, experts=experts, feeds=one.feeds))
        for section, one in zip(sections, layer, strict=True)
    )
    late, begun = ([_price(prices, *each) for each in zip(sections, one, strict=True)] for one in (layer, ahead))
    if sum(spared_s(prices.profile, one, sections[0], experts=experts) for one in begun) <= 0:
        return layer
    attention, mlp = (one.memory for one in begun)
    above = late[0].memory
    if _at(above, 0) + _at(attention, 4) + _at(mlp, 2) > _at(mlp, 0) + _at(attention, 2):
        return layer
    return ahead[0], ahead[1]


def spared_s(profile: Profile, price: PricedSection, above: Section, *, experts: bool) -> float:
    """How much shorter a checkpoint takes because what it has begun ahead travels while the attention half above computes, and is
    slower. Tokens travel beside all of that, a reduction with sequence parallelism beside what lies between two gathers."""
    if price.begun is None:
        return 0.0
    between_gathers = profile.shape.sequence_parallel and not experts
    computes_s = behind_gather_s(profile, above) if between_gathers else profile.of(above).backward_s
    return min(price.begun.under_way_s / profile.interference, computes_s) - price.begun.again_s


def _price(prices: Prices, section: Section, checkpoint: Checkpoint | None) -> PricedSection:
    return prices.of(section, checkpoint.items(section) if checkpoint else (), checkpoint)


def _at(memory: HalfMemory, before: int) -> int:
    """What a half holds so many moments before its backward begins."""
    return memory.columns[BEGINS - before]
