"""Passes of a stage: seconds and bytes, folded over the events of its timetable.

   forward    [ norm, column-parallel, ..., row-parallel ] (fwd.0) [ dropout, residual ]
   backward   [ residual, dropout, row-parallel, ..., column-parallel ] (bwd.0) [ norm ]

   with       forward    [ norm ] (fwd.0) [ column-parallel ... row-parallel ] (fwd.1) [ dropout, residual ]
   sequence   backward   [ residual, dropout ] (bwd.0) [ row-parallel ... dgrad ] (bwd.1) [ wgrad ] (bwd.2) [ norm ]
   parallelism

In a window, recomputation runs first, then delayed weight gradients, then the rest of the collective, then input gathers. When
backward enters a half, the rest of its recomputation runs on demand, after its exposed gather. A checkpoint that keeps no input
gets it from the halves before it, which are recomputed first and stay from then on. A collective begun ahead is in flight during
compute, but not during a wait. A delayed weight gradient takes no time in its own half.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from megatron_lynx.anatomy import Collective, Section
from megatron_lynx.anatomy import Pass as Passing
from megatron_lynx.anatomy.address import RECV_BACKWARD, SEND_BACKWARD, Window, WindowAddress
from megatron_lynx.cost.communication import window_lengths_s, windows_of
from megatron_lynx.cost.ends import NO_BLOCK
from megatron_lynx.cost.host import NO_HOST_TIME
from megatron_lynx.cost.section import Prices, weight_gradient
from megatron_lynx.schedule.schedule import ActionKind
from megatron_lynx.simulator.passes import ChunkPasses, PassKey, Pending, TimedPass, walked_once
from megatron_lynx.simulator.walk import Treated, Walk
from megatron_lynx.timetable import HalfPass, Linear, Pass, Timetable, Wait

if TYPE_CHECKING:
    from megatron_lynx.profiler.profile import BlockProfile, Profile


@dataclass(frozen=True)
class Segments:
    """Seconds of compute, and of the windows between them. The rest is of a backward."""

    compute_s: tuple[float, ...]
    windows_s: tuple[float, ...]
    ends: Mapping[str, int] = field(default_factory=dict)
    """By linear: windows before the point where its weight gradient is delayed."""
    freed: tuple[str, ...] = ()
    """Linears whose inputs are freed in the last window: the last linear, or those of all experts."""
    core: tuple[int, float] = (0, 0.0)
    """With a core attention: (windows before it, seconds between the last of them and it)."""


def stage_passes(
    timetable: Timetable,
    chunk: int,
    halves: Sequence[Treated],
    prices: Prices,
    ends: tuple[BlockProfile, BlockProfile] = (NO_BLOCK, NO_BLOCK),
    deferral: tuple[int, int] = (0, 0),
    *,
    reduced_in_backward: bool = False,
    read_after_send: bool = False,
) -> ChunkPasses:
    """Return the passes of one chunk of a stage.

    Args:
        halves: those of the chunk, in forward order.
        ends: the embedding and the head, without seconds if the chunk has none.
        deferral: this chunk's (index, most bytes of delayed weight gradients); its last backward computes the rest.
        reduced_in_backward: gradients are reduced during the chunk's last backward of a step, which then delays none.
        read_after_send: weight gradients left by the chunk's last backward run once the gradient of its input is sent.
    """
    interference, (embedding, head) = prices.profile.interference, ends
    of_key = {half.planned.key: half for half in halves}
    host = sum((half.host for half in halves), start=NO_HOST_TIME)
    drains_otherwise = any(half.planned.delayed(drains=False) != half.planned.delayed(drains=True) for half in halves)
    defers_any = any(half.deferred for planned in timetable.chunks for half in planned)
    messages: dict[ActionKind, tuple[Window, Pass]] = {
        "R": (RECV_BACKWARD, timetable.receive(chunk)),
        "W": (SEND_BACKWARD, timetable.sent(chunk)),
    }
    sends_first = defers_any and read_after_send

    def walked(key: PassKey, pending: Pending) -> tuple[TimedPass, Pending]:
        kind, which, last = key
        made, host_s = partial(Walk, of_key, deferral, pending), 0.0
        if kind in messages:
            window, message = messages[kind]
            walk = made(message)
            walk.during(window, message.at("in", window))
            if kind == "W" and last and sends_first:
                walk.flush(during_send=True)
        elif kind == "F":
            walk, host_s = made(timetable.forward(chunk), interference, embedding.forward_s), host.forward_s
            _forward(walk, halves, prices)
            walk.compute(head.forward_s)
        else:
            walk, host_s = made(timetable.backward(chunk), interference, head.backward_s), host.backward_s
            _backward(walk, halves, prices, None if last and reduced_in_backward else which == "cooldown" or last)
            walk.compute(embedding.backward_s)
            if last and not read_after_send:
                walk.flush()
        return walk.over().issued_in(host_s), tuple(walk.pending)

    def plain(key: PassKey) -> PassKey | None:
        kind, which, last = key
        if kind in messages and not messages[kind][1].tasks and not (kind == "W" and last and sends_first):
            return None
        alone = kind == "B" and which == "cooldown" and drains_otherwise
        return kind, "cooldown" if alone else "steady", last and defers_any

    return ChunkPasses(walked_once(walked, plain))


def segments(profile: Profile, passing: Passing, section: Section, deferred: Collection[str] = ()) -> Segments:
    """Return a section's seconds around its windows. `deferred`: linears whose weight gradients are delayed, and not counted."""
    half, waited = profile.of(section), windows_of(profile, section, passing)
    windows_s = window_lengths_s(profile, passing, section, profile.message_bytes, deferred)
    places = [section.place_behind(collective) for collective in waited]
    if passing == "fwd":
        items_s = [half.items[name].forward_s for name in section.names]
        cuts = [0, *(place + 1 for place in places), len(items_s)]
        compute_s, whole_s = [sum(items_s[at:end]) for at, end in pairwise(cuts)], half.forward_s
        parts = Segments((), windows_s)
    else:
        off_s = {linear: weight_gradient(profile, section, linear).seconds for linear in section.linears if linear in deferred}
        items_s = [max(0.0, half.items[name].backward_s - off_s.get(name, 0.0)) for name in section.names]
        cuts = [len(items_s), *places, 0]
        compute_s, whole_s = [sum(items_s[end:at]) for at, end in pairwise(cuts)], half.backward_s - sum(off_s.values())
        for at, (collective, place) in enumerate(zip(waited, places, strict=True)):
            if isinstance(collective, Collective) and collective.beside == "dgrad" and section.names[place] not in off_s:
                wgrad_s = min(compute_s[at], half.items[section.names[place]].wgrad_s)  # it runs after the collective
                compute_s[at : at + 2] = compute_s[at] - wgrad_s, compute_s[at + 1] + wgrad_s
        behind = {linear: section.behind_wgrad(linear, profile.shape.sequence_parallel) for linear in section.linears}
        ends = {linear: min(windows, len(waited)) for linear, windows in behind.items()}
        waits = section.exchanges_of.get("bwd", ())
        core = section.index(section.core) if section.core else len(items_s)
        before = [place for place in places if place > core]
        before_s = sum(items_s[core + 1 : before[-1] if before else None])
        of_experts = (linear for linear in section.linears if section.behind_wgrad(linear, False) < len(waits))
        freed = tuple(of_experts) if section.exchanges else section.linears[-1:]
        parts = Segments((), windows_s, ends, freed, (len(before), before_s))
    if section.exchanges:  # waits that are not windows count as compute at the end of the pass
        compute_s[-1] += max(0.0, whole_s - sum(windows_s) - sum(compute_s))
    return replace(parts, compute_s=tuple(compute_s))


def _waits(planned: HalfPass, passing: Passing, parts: Segments) -> Sequence[Wait]:
    """Opaque exchanges of experts are in no timetable."""
    return planned.waits or [Wait(WindowAddress(passing, *planned.half, ordinal)) for ordinal in range(len(parts.windows_s))]


def _forward(walk: Walk, treated: Sequence[Treated], prices: Prices) -> None:
    for number, (half, planned) in enumerate(zip(treated, walk.through.halves, strict=True), start=1):
        start_s, parts = walk.clock_s, prices.once(segments, "fwd", half.section)
        for compute_s, window_s, wait in zip(parts.compute_s, parts.windows_s, _waits(planned, "fwd", parts), strict=False):
            walk.compute(compute_s)
            walk.window(wait, window_s)
        walk.compute(parts.compute_s[-1])
        walk.hold(half.price.memory.resident)
        walk.draw("forward", start_s, walk.clock_s, planned.half)
        walk.copy_out(number, half)


def _backward(walk: Walk, treated: Sequence[Treated], prices: Prices, delays: bool | None) -> None:
    """`treated`: in forward order. `delays`: whether it also delays the weight gradients of the drain; None: it delays none."""
    away = [half for half in treated if half.leaving is not None]
    not_in_hand = [0, *(half.price.memory.less_in_hand for half in treated)]
    walk.hold(-not_in_hand[-1])
    for number, half, planned in zip(range(len(treated), 0, -1), reversed(treated), walk.through.halves, strict=True):
        walk.copy_back(number, away)
        walk.needs(planned.half)
        walk.on_demand("demand", planned.half)
        walk.on_demand("enter", planned.half)
        start_s = walk.clock_s
        delayed = frozenset[str]() if delays is None else half.planned.delayed(drains=delays)
        more_bytes = not_in_hand[number] - not_in_hand[number - 1]
        _back_through(walk, half, planned, prices.once(segments, "bwd", half.section, delayed), delayed, more_bytes)
        walk.draw("backward", start_s, walk.clock_s, planned.half)


def _back_through(
    walk: Walk, half: Treated, planned: HalfPass, parts: Segments, delayed: frozenset[str], more_bytes: int
) -> None:
    """`more_bytes`: transient bytes of the next half that count from this half's end."""
    memory, last, waits = half.price.memory, len(parts.windows_s) - 1, _waits(planned, "bwd", parts)
    tail = memory.tail if parts.windows_s else memory.whole
    first = max(0, min(memory.regenerated, memory.whole - tail))
    begins, before_s = parts.core
    for ordinal, compute_s in enumerate(parts.compute_s):
        if ordinal == begins and walk.through.at("core", planned.half):
            walk.compute(before_s)
            compute_s -= before_s
            walk.on_demand("core", planned.half)
        walk.compute(compute_s)
        ran_s = _defer(walk, half, ordinal, parts, delayed)
        if ordinal == last:  # in its last window a half frees all but the inputs of its last GEMM (`cost.memory`)
            walk.hold(tail - memory.whole, -first)
            walk.hold_operands(*(Linear(*planned.half, linear) for linear in parts.freed))
        if ordinal <= last:
            wait = waits[ordinal]
            walk.window(wait, max(0.0, parts.windows_s[ordinal] - ran_s - half.spared_s(wait.gathered)))
    walk.hold(more_bytes - tail, first - memory.regenerated)
    walk.hold_operands(*walk.unheld)


def _defer(walk: Walk, half: Treated, ordinal: int, parts: Segments, delayed: frozenset[str]) -> float:
    """Delay weight gradients of `delayed` linears whose backward ends before window `ordinal`.

    Returns the seconds of earlier weight gradients that run during that window's collective: those over the bound, or, in a
    backward that delays none, those left of the same linear.
    """
    ran_s, section = 0.0, half.section
    for linear, cost in half.deferred.items():
        if ordinal == parts.ends[linear]:
            of, reduces = Linear(*half.planned.key, linear), not section.exchanges and linear != section.row_parallel
            start_s = walk.clock_s
            if linear in delayed:
                walk.defer(of, cost.cut(half.planned.pieces.get(linear, 1)))
            else:
                walk.flush(of)
            ran_s += (walk.clock_s - start_s) * reduces
            if not reduces or ordinal < len(parts.windows_s) - 1:
                walk.hold_operands(of, most_bytes=cost.gradient_bytes)
    return ran_s
