"""What recomputation buys: bytes of one layer against seconds, for every set of replayed items worth looking at.

seconds │                    o full               The front begins with nothing replayed. Balanced recomputation (norms and
        │             o                           the activation; Yuan et al., ATC '24) ends the flat stretch, before a GEMM
        │   balanced                              or the attention has to run again.
        │ o──o
        └─────────────────────── bytes saved
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron_lynx.anatomy import Section
from megatron_lynx.cost.communication import gather_once_s
from megatron_lynx.cost.replay import sensible_choices
from megatron_lynx.cost.section import gathers, priced
from megatron_lynx.profiler.profile import Profile


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
