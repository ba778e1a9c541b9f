"""The passes of a stage from its layer halves: what runs, where it waits, what is replayed meanwhile, what that holds.

   forward    [ norm, column-parallel, ..., row-parallel ] (fwd.0) [ dropout, residual ]
   backward   [ residual, dropout, row-parallel, ..., column-parallel ] (bwd.0) [ norm ]

   with       forward    [ norm ] (fwd.0) [ column-parallel ... row-parallel ] (fwd.1) [ dropout, residual ]
   sequence   backward   [ residual, dropout ] (bwd.0) [ row-parallel ... dgrad ] (bwd.1) [ wgrad ] (bwd.2) [ norm ]
   parallelism

[1] what is left of a replay for on demand runs when backward enters its half; its gather, as far as it delays, comes before
[2] in a window the replays run first, then what is left of the window is waited for, and then inputs are gathered
[3] in its last window a half lets go of all but what its last GEMM reads (`cost.memory`), then others are regenerated
[4] a pass takes as long as the host needs to issue its halves, at least
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from megatron_lynx.anatomy import PASSES, Collective, Pass, Section
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, Window, WindowAddress
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.host import NO_HOST_TIME
from megatron_lynx.schedule.schedule import Phase
from megatron_lynx.simulator.passes import PHASES, ChunkPasses, TimedPass
from megatron_lynx.simulator.treated import Part, Treated
from megatron_lynx.simulator.walk import Walk

if TYPE_CHECKING:
    from megatron_lynx.profiler.profile import BlockProfile, ItemProfile, Profile


Served = dict[Window, tuple[Part, ...]]
"""Parts of replays by the window that hides them, those that backward needs first first."""

Gathered = dict[Window, int]
"""Bytes of inputs that are gathered behind a window, and of what had to be made for that."""


@dataclass(frozen=True)
class Segments:
    """One section in one pass: seconds of compute, between them its windows."""

    compute_s: tuple[float, ...]
    windows_s: tuple[float, ...]


T = TypeVar("T")

Parts = Mapping[Section, Segments]
"""The sections of a stage's layers."""


def stage_passes(
    treated: Sequence[Treated],
    profile: Profile,
    message_bytes: int,
    embedding: BlockProfile | None = None,
    head: BlockProfile | None = None,
    others: Mapping[int, Sequence[Treated]] = MappingProxyType({}),
) -> ChunkPasses:
    """The passes of one stage. `treated`: its halves in forward order. `embedding`, `head`: on the stages that have them.
    `others`: the halves of the stage's other chunks, by chunk; a forward may hide their replays."""
    sections = {half.section for half in (*treated, *chain.from_iterable(others.values()))}
    forward, backward = (
        {section: segments(profile, passing, section, message_bytes) for section in sections} for passing in PASSES
    )
    first = (embedding.forward_s if embedding else 0.0, head.forward_s if head else 0.0)
    back = (head.backward_s if head else 0.0, embedding.backward_s if embedding else 0.0)
    host = sum((half.host for half in treated), start=NO_HOST_TIME)  # [4]

    def forward_pass(served: Served, gathered: Gathered) -> TimedPass:
        return _forward(treated, served, gathered, forward, profile.interference, first).issued_in(host.forward_s)

    return ChunkPasses(
        forward={phase: forward_pass(*_hidden(treated, phase)) for phase in PHASES},
        backward={
            phase: _backward(treated, phase, backward, profile.interference, back).issued_in(host.backward_s) for phase in PHASES
        },
        received={phase: _received(treated, phase) for phase in PHASES},
        hiding={chunk: forward_pass(*_as_seen_by(treated, other)) for chunk, other in others.items()},
    )


def segments(profile: Profile, passing: Pass, section: Section, message_bytes: int) -> Segments:
    """How a section's seconds lie around its windows: where each one is, the section's collectives say."""
    if section.opaque:
        assert profile.experts is not None, "a profile with such a section has its figures"
        return Segments((profile.experts.forward_s if passing == "fwd" else profile.experts.backward_s,), ())
    windows_s = window_lengths_s(profile, passing, section, message_bytes)
    waited = section.collectives(passing, profile.shape.sequence_parallel) if windows_s else ()
    between = _between_forward if passing == "fwd" else _between_backward
    return Segments(tuple(between(profile.half(section.half).items, section, waited)), windows_s)


def _between_forward(items: Mapping[str, ItemProfile], section: Section, waited: Sequence[Collective]) -> Iterator[float]:
    cuts = [section.items.index(section.item(collective.behind)) + 1 for collective in waited]
    for begin, end in pairwise([0, *cuts, len(section.names)]):
        yield sum(items[name].forward_s for name in section.names[begin:end])


def _between_backward(items: Mapping[str, ItemProfile], section: Section, waited: Sequence[Collective]) -> Iterator[float]:
    """What is waited for beside the dgrad of a linear has its wgrad behind it."""
    end, behind_s = len(section.names), 0.0
    for collective in waited:
        begin = section.items.index(section.item(collective.behind))
        seconds = behind_s + _backward_s(items, section, begin, end)
        wgrad_s = items[section.names[begin]].wgrad_s if collective.beside == "dgrad" else 0.0
        yield max(0.0, seconds - wgrad_s)
        end, behind_s = begin, min(seconds, wgrad_s)
    yield behind_s + _backward_s(items, section, 0, end)


def _backward_s(items: Mapping[str, ItemProfile], section: Section, begin: int, end: int) -> float:
    """Backward seconds of some items. Those between norm and residual addition are summed up as one where no window cuts them."""
    stretches = groupby(section.names[begin:end], key=section.on_own_rows.__contains__)
    return sum(sum(items[name].backward_s for name in names) for _, names in stretches)


def _forward(
    treated: Sequence[Treated],
    served: Served,
    gathered: Gathered,
    halves: Parts,
    interference: float,
    ends_s: tuple[float, float],
) -> TimedPass:
    """One forward. `served`, `gathered`: what its windows hide of replays, and what is gathered behind them."""
    walk = Walk(interference, ends_s[0])
    for half in treated:
        start_s = walk.clock_s
        parts = halves[half.section]
        for ordinal, compute_s in enumerate(parts.compute_s):
            walk.compute(compute_s)
            if ordinal < len(parts.windows_s):
                place = WindowAddress("fwd", half.layer, half.half, ordinal)
                walk.window(place, parts.windows_s[ordinal], served.get(place, ()))
                walk.regenerate(gathered.get(place, 0))
        walk.hold(half.memory.resident)
        walk.half("forward", start_s, half)
    walk.compute(ends_s[1])
    return walk.over()


def _backward(
    treated: Sequence[Treated], phase: Phase, halves: Parts, interference: float, ends_s: tuple[float, float]
) -> TimedPass:
    walk = Walk(interference, ends_s[0])
    served, gathered = _served(treated, phase), _gathered(treated, phase)
    late = {(part.half.layer, part.half.half): part for part in served.get(ON_DEMAND, ())}
    for half in reversed(treated):
        if (part := late.get((half.layer, half.half))) is not None:
            walk.on_demand(part)
        start_s = walk.clock_s
        _back_through(walk, half, halves[half.section], served, gathered)
        walk.half("backward", start_s, half)
    walk.compute(ends_s[1])
    return walk.over()


def _back_through(walk: Walk, half: Treated, parts: Segments, served: Served, gathered: Gathered) -> None:
    """One half's backward, from its first segment to its last."""
    last, left, regenerated = len(parts.windows_s) - 1, half.memory.whole, half.memory.regenerated
    for ordinal, compute_s in enumerate(parts.compute_s):
        walk.compute(compute_s)
        if ordinal == last:  # [3]
            first = max(0, min(regenerated, left - half.memory.tail))
            walk.hold(half.memory.tail - left, regenerated_bytes=-first)
            left, regenerated = half.memory.tail, regenerated - first
        if ordinal <= last:
            place = WindowAddress("bwd", half.layer, half.half, ordinal)
            walk.window(place, parts.windows_s[ordinal], served.get(place, ()))
            walk.regenerate(gathered.get(place, 0))
    walk.hold(-left, regenerated_bytes=-regenerated)


def _received(treated: Sequence[Treated], phase: Phase) -> TimedPass:
    """The replays that run while the gradient is received."""
    walk = Walk(1.0)
    for part in _served(treated, phase).get(RECV_BACKWARD, ()):
        walk.regenerate(part.taken_bytes)
        walk.replay(part.half, part.seconds, RECV_BACKWARD)
    return walk.over()


def _hidden(treated: Sequence[Treated], phase: Phase) -> tuple[Served, Gathered]:
    """What a forward of the same chunk hides, and what is gathered behind its collectives."""
    return (_served(treated, "steady"), _gathered(treated, "steady")) if phase == "steady" else ({}, {})


def _as_seen_by(running: Sequence[Treated], other: Sequence[Treated]) -> tuple[Served, Gathered]:
    """The same of another chunk: its layers are known by where they stand in their chunk."""
    moved = running[0].layer - other[0].layer
    return _moved(_served(other, "steady"), moved), _moved(_gathered(other, "steady"), moved)


def _moved(by_window: Mapping[Window, T], layers: int) -> dict[Window, T]:
    return {
        window._replace(layer=window.layer + layers): content
        for window, content in by_window.items()
        if isinstance(window, WindowAddress) and window.passing == "fwd"
    }


def _served(treated: Iterable[Treated], phase: Phase) -> Served:
    served: Served = {}
    for half in reversed(tuple(treated)):
        for part in half.parts(phase) if half.replayed else ():
            served[part.window] = (*served.get(part.window, ()), part)
    return served


def _gathered(treated: Iterable[Treated], phase: Phase) -> Gathered:
    gathered: Gathered = {}
    for half in treated:
        if half.replayed and (place := half.gathered(phase)) is not None:
            gathered[place[0]] = gathered.get(place[0], 0) + place[1]
    return gathered
