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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from megatron_lynx.anatomy import Collective, Section
from megatron_lynx.anatomy import Pass as Passing
from megatron_lynx.anatomy.address import RECV_BACKWARD, SEND_BACKWARD, WindowAddress
from megatron_lynx.cost.communication import window_lengths_s, windows_of
from megatron_lynx.cost.ends import NO_BLOCK
from megatron_lynx.cost.host import NO_HOST_TIME
from megatron_lynx.cost.section import Prices, weight_gradient
from megatron_lynx.kinds.section import Exchange
from megatron_lynx.simulator.passes import ChunkPasses, Kind, PassKey, Queue, TimedPass, walked_once
from megatron_lynx.simulator.walk import Halves, Treated, Walk
from megatron_lynx.timetable import HalfPass, Linear, Pass, Task, Timetable, Wait

if TYPE_CHECKING:
    from megatron_lynx.profiler.profile import BlockProfile, ItemProfile, Profile


@dataclass(frozen=True)
class Segments:
    """Seconds of compute, and of the windows between them."""

    compute_s: tuple[float, ...]
    windows_s: tuple[float, ...]
    ends: Mapping[str, int] = field(default_factory=dict)
    """By linear: windows of its half's backward before the point where its weight gradient is delayed."""
    core: tuple[int, float] = (0, 0.0)
    """Backward with a core attention: (windows before it, seconds between the last of them and it)."""


Waited = Sequence[Collective | Exchange]

Parts = Callable[..., Segments]
"""Of a pass and a section, and of the linears whose weight gradients are delayed in that backward."""


def stage_passes(
    timetable: Timetable,
    chunk: int,
    chunk_halves: Sequence[Treated],
    halves: Halves,
    prices: Prices,
    ends: tuple[BlockProfile, BlockProfile] = (NO_BLOCK, NO_BLOCK),
    deferral: tuple[int, int] = (0, 0),
    *,
    reduced_in_backward: bool = False,
    read_after_send: bool = False,
) -> ChunkPasses:
    """Return the passes of one chunk of a stage.

    Args:
        chunk_halves: in forward order. `halves` are those of all chunks.
        ends: the embedding and the head, without seconds if the chunk has none.
        deferral: this chunk's (index, most bytes of delayed weight gradients); its last backward computes the rest.
        reduced_in_backward: gradients are reduced during the chunk's last backward of a step, which then delays none.
        read_after_send: weight gradients left by the chunk's last backward run once the gradient of its input is sent.
    """
    interference, (embedding, head) = prices.profile.interference, ends
    parts = partial(prices.once, segments)
    host = sum((half.host for half in chunk_halves), start=NO_HOST_TIME)
    drains_otherwise = any(half.planned.delayed(drains=False) != half.planned.delayed(drains=True) for half in chunk_halves)
    defers_any = any(half.deferred for half in timetable.all_halves)
    messages: dict[Kind, tuple[str, tuple[Task, ...]]] = {
        "R": (RECV_BACKWARD, timetable.receive(chunk).at("in", RECV_BACKWARD)),
        "W": (SEND_BACKWARD, timetable.sent(chunk).at("in", SEND_BACKWARD)),
    }
    working = {kind for kind, (_, tasks) in messages.items() if tasks} | ({"W"} if defers_any and read_after_send else set())

    def walked(key: PassKey, queue: Queue) -> TimedPass:
        kind, which, last = key
        if kind in messages:
            walk = Walk(1.0, halves, queue)
            walk.during(*messages[kind])
            if kind == "W" and last and read_after_send:
                walk.flush(during_send=True)
            return walk.over()
        if kind == "F":
            walk = Walk(interference, halves, queue, embedding.forward_s)
            return _forward(walk, timetable.forward(chunk), chunk_halves, parts, head.forward_s).issued_in(host.forward_s)
        walk = Walk(interference, halves, queue, head.backward_s)
        delays = None if last and reduced_in_backward else which == "cooldown" or last
        _backward(walk, timetable.backward(chunk), chunk_halves, parts, delays)
        walk.compute(embedding.backward_s)
        if last and not read_after_send:
            walk.flush()
        return walk.over().issued_in(host.backward_s)

    def plain(key: PassKey) -> PassKey:
        """Return the one key of all passes that are equal to this one's, so that each is walked once."""
        kind, which, last = key
        alone = kind == "B" and which == "cooldown" and drains_otherwise
        return kind, "cooldown" if alone else "steady", last and defers_any

    return ChunkPasses(walked_once(walked, partial(Queue, *deferral), plain), idle=frozenset(messages.keys() - working))


def segments(profile: Profile, passing: Passing, section: Section, deferred: Collection[str] = ()) -> Segments:
    """Return a section's seconds around its windows. `deferred`: linears whose weight gradients are delayed, and not counted."""
    windows_s = window_lengths_s(profile, passing, section, profile.message_bytes, deferred)
    waited, half = windows_of(profile, section, passing), profile.of(section)
    off_s, parts = 0.0, Segments((), windows_s)
    if passing == "fwd":
        cuts = [0, *(section.place_behind(collective) + 1 for collective in waited), len(section.names)]
        *compute_s, last_s = (sum(half.items[name].forward_s for name in section.names[at:end]) for at, end in pairwise(cuts))
    else:
        off = {linear: weight_gradient(profile, section, linear).seconds for linear in section.linears if linear in deferred}
        items = {name: _without(item, off[name]) if name in off else item for name, item in half.items.items()}
        behind = {linear: section.behind_wgrad(linear, profile.shape.sequence_parallel) for linear in section.linears}
        ends = {linear: min(windows, len(waited)) for linear, windows in behind.items()}
        off_s, parts = sum(off.values()), replace(parts, ends=ends, core=_before_core(items, section, waited))
        *compute_s, last_s = _between_backward(items, section, waited)
    if section.exchanges:  # waits that are not windows count as compute at the end of the pass
        whole_s = (half.forward_s if passing == "fwd" else half.backward_s) - off_s
        last_s += max(0.0, whole_s - sum(windows_s) - sum(compute_s) - last_s)
    return replace(parts, compute_s=(*compute_s, last_s))


def _without(item: ItemProfile, wgrad_s: float) -> ItemProfile:
    return item.model_copy(update={"backward_s": max(0.0, item.backward_s - wgrad_s), "wgrad_s": 0.0})


def _between_backward(items: Mapping[str, ItemProfile], section: Section, waited: Waited) -> Iterator[float]:
    """Yield backward seconds between waits. The wgrad of a linear whose dgrad overlaps a collective runs after it."""
    end, behind_s = len(section.names), 0.0
    for collective in waited:
        begin = section.place_behind(collective)
        seconds = behind_s + _backward_s(items, section, begin, end)
        beside_dgrad = isinstance(collective, Collective) and collective.beside == "dgrad"
        wgrad_s = items[section.names[begin]].wgrad_s if beside_dgrad else 0.0
        yield max(0.0, seconds - wgrad_s)
        end, behind_s = begin, min(seconds, wgrad_s)
    yield behind_s + _backward_s(items, section, 0, end)


def _before_core(items: Mapping[str, ItemProfile], section: Section, waited: Waited) -> tuple[int, float]:
    if not section.core:
        return 0, 0.0
    at = section.index(section.core)
    cuts = [place for collective in waited if (place := section.place_behind(collective)) > at]
    return len(cuts), _backward_s(items, section, at + 1, cuts[-1] if cuts else len(section.names))


def _backward_s(items: Mapping[str, ItemProfile], section: Section, begin: int, end: int) -> float:
    return sum(items[name].backward_s for name in section.names[begin:end])


def _forward(walk: Walk, through: Pass, treated: Sequence[Treated], segments_of: Parts, end_s: float) -> TimedPass:
    for number, (half, planned) in enumerate(zip(treated, through.halves, strict=True), start=1):
        start_s = walk.clock_s
        parts = segments_of("fwd", half.section)
        for ordinal, compute_s in enumerate(parts.compute_s):
            walk.compute(compute_s)
            if ordinal < len(parts.windows_s):
                wait = _wait(planned, "fwd", ordinal)
                walk.window(wait, parts.windows_s[ordinal], through.at("in", wait.window))
        walk.hold(half.memory.resident)
        walk.span("forward", start_s, half)
        walk.copy_out(number, half)
    walk.compute(end_s)
    return walk.over()


def _wait(planned: HalfPass, passing: Passing, ordinal: int) -> Wait:
    """Opaque exchanges of experts are in no timetable."""
    return planned.waits[ordinal] if ordinal < len(planned.waits) else Wait(WindowAddress(passing, *planned.half, ordinal))


def _backward(walk: Walk, through: Pass, treated: Sequence[Treated], segments_of: Parts, delays: bool | None) -> None:
    """`treated`: in forward order. `delays`: whether it also delays the weight gradients of the drain; None: it delays none."""
    away = [half for half in treated if half.leaving is not None]
    not_in_hand = [0, *(half.memory.less_in_hand for half in treated)]
    walk.hold(-not_in_hand[-1])
    for number, half, planned in zip(range(len(treated), 0, -1), reversed(treated), through.halves, strict=True):
        walk.copy_back(number, away)
        walk.needs(half.planned.key)
        for task in (*through.at("demand", planned.half), *through.at("enter", planned.half)):
            walk.needs(task.half)
            walk.on_demand(task)
        start_s = walk.clock_s
        delayed = frozenset[str]() if delays is None else half.planned.delayed(drains=delays)
        over_bytes = not_in_hand[number] - not_in_hand[number - 1]
        _back_through(walk, half, through, planned, segments_of("bwd", half.section, delayed), delayed, over_bytes)
        walk.span("backward", start_s, half)


def _back_through(
    walk: Walk,
    half: Treated,
    through: Pass,
    planned: HalfPass,
    parts: Segments,
    delayed: frozenset[str],
    over_bytes: int,
) -> None:
    """`over_bytes`: transient bytes of the next half that count from this half's end."""
    last, left, regenerated = len(parts.windows_s) - 1, half.memory.whole, half.memory.regenerated
    for ordinal, compute_s in enumerate(parts.compute_s):
        begins, before_s = parts.core
        if ordinal == begins and (tasks := through.at("core", planned.half)):
            walk.compute(before_s)
            compute_s -= before_s
            for task in tasks:
                walk.on_demand(task)
        walk.compute(compute_s)
        ran_s = _defer(walk, half, ordinal, parts, delayed)
        if ordinal == last:  # in its last window a half frees all but the inputs of its last GEMM (`cost.memory`)
            first = max(0, min(regenerated, left - half.memory.tail))
            walk.hold(half.memory.tail - left, regenerated_bytes=-first)
            left, regenerated = half.memory.tail, regenerated - first
            _hold_rest(walk, half, *_let_go_of(half.section))
        if ordinal <= last:
            wait = _wait(planned, "bwd", ordinal)
            during, after = through.at("in", wait.window), through.at("after", wait.window)
            walk.needs(*(task.half for task in (*during, *after) if task.do in ("recompute", "begin")))
            walk.window(wait, max(0.0, parts.windows_s[ordinal] - ran_s - half.spared_s(wait.gathered)), during, after)
    walk.hold(over_bytes - left, regenerated_bytes=-regenerated)
    _hold_rest(walk, half, *half.deferred)


def _let_go_of(section: Section) -> tuple[str, ...]:
    """Linears whose inputs are freed in the half's last window: the last linear, or those of all experts."""
    if section.exchanges:
        waits = len(section.exchanges_of["bwd"])
        return tuple(linear for linear in section.linears if section.behind_wgrad(linear, False) < waits)
    return section.linears[-1:]


def _hold_rest(walk: Walk, half: Treated, *linears: str) -> None:
    """Count the inputs of these linears to their delayed weight gradients, because their half frees them now."""
    for linear in linears:
        if linear in half.deferred:
            walk.holds(Linear(half.layer, half.half, linear), half.deferred[linear].bytes)


def _defer(walk: Walk, half: Treated, ordinal: int, parts: Segments, delayed: frozenset[str]) -> float:
    """Delay weight gradients of `delayed` linears whose backward ends before window `ordinal`.

    Returns the seconds of earlier weight gradients that run during that window's collective: those over the bound, or, in a
    backward that delays none, those left of the same linear.
    """
    ran_s, section = 0.0, half.section
    for linear, cost in half.deferred.items():
        if ordinal == parts.ends[linear]:
            of, reduces = Linear(half.layer, half.half, linear), not section.exchanges and linear != section.row_parallel
            start_s = walk.clock_s
            if linear in delayed:
                walk.defer(of, cost.cut(half.planned.pieces.get(linear, 1)))
            else:
                walk.flush(of)
            ran_s += (walk.clock_s - start_s) * reduces
            if not reduces or ordinal < len(parts.windows_s) - 1:
                walk.holds(of, cost.gradient_bytes)
    return ran_s
