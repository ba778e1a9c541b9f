"""The passes of a stage: seconds and bytes, folded over the events of its timetable.

   forward    [ norm, column-parallel, ..., row-parallel ] (fwd.0) [ dropout, residual ]
   backward   [ residual, dropout, row-parallel, ..., column-parallel ] (bwd.0) [ norm ]

   with       forward    [ norm ] (fwd.0) [ column-parallel ... row-parallel ] (fwd.1) [ dropout, residual ]
   sequence   backward   [ residual, dropout ] (bwd.0) [ row-parallel ... dgrad ] (bwd.1) [ wgrad ] (bwd.2) [ norm ]
   parallelism

[1] what is left of a replay for on demand runs when backward enters its half; its gather, as far as it delays, comes before. A
    checkpoint that keeps no input gets it from halves before it, which run again first, and hold from then on what they make.
    What begins ahead runs behind that; what it leaves under way passes while compute goes on, but not while that waits itself
[2] in a window the replays run first, then what is left of the window is waited for, and then inputs are gathered
[3] in its last window a half lets go of all but what its last GEMM reads (`cost.memory`), then others are regenerated
[4] a pass takes as long as the host needs to issue its halves, at least
[5] a deferred weight gradient is none of its half's seconds, hides nothing beside it, and runs behind the replays of a wait
[6] what leaves within a micro-batch leaves behind its half, and comes back before it (`half_copies`)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from megatron_lynx.anatomy import PASSES, Collective, Section
from megatron_lynx.anatomy import Pass as Passing
from megatron_lynx.anatomy.address import RECV_BACKWARD, WindowAddress
from megatron_lynx.cost.communication import window_lengths_s, windows_of
from megatron_lynx.cost.host import NO_HOST_TIME
from megatron_lynx.cost.weight_gradient import weight_gradient
from megatron_lynx.kinds.section import Exchange
from megatron_lynx.simulator.half_copies import ComingBack, GoingOut
from megatron_lynx.simulator.passes import PHASES, ChunkPasses, Filled, PassKey, Queue, TimedPass, Walked
from megatron_lynx.simulator.treated import HalfKind, Halves, Treated
from megatron_lynx.simulator.walk import Walk, recomputed
from megatron_lynx.timetable import HalfPass, Linear, Pass, Task, Timetable, Wait

if TYPE_CHECKING:
    from megatron_lynx.profiler.profile import BlockProfile, ItemProfile, Profile


@dataclass(frozen=True)
class Segments:
    """One section in one pass: seconds of compute, between them its windows."""

    compute_s: tuple[float, ...]
    windows_s: tuple[float, ...]
    ends: Mapping[str, int] = field(default_factory=dict)
    """By linear: how many windows of its half's backward come before the place where its weight gradient is put off."""
    core: tuple[int, float] = (0, 0.0)
    """Of a backward with a core attention: how many windows come before that, and the seconds between the last of them and it."""


Waited = Sequence[Collective | Exchange]
"""What a section waits for in one pass."""

Parts = Mapping[HalfKind, Segments]
"""The kinds of halves in a stage's layers."""


def stage_passes(
    timetable: Timetable,
    chunk: int,
    own: Sequence[Treated],
    halves: Halves,
    profile: Profile,
    message_bytes: int,
    embedding: BlockProfile | None = None,
    head: BlockProfile | None = None,
    deferral: tuple[int, int] = (0, 0),
    *,
    reduced_in_backward: bool = False,
) -> ChunkPasses:
    """The passes of one chunk of a stage. `own`: its halves in forward order. `halves`: those of all chunks, whose replays it may
    hide. `embedding`, `head`: on the stages that have them. `deferral`: whose deferred weight gradients must be computed by its
    last backward, and how many bytes they may hold: this chunk's. `reduced_in_backward`: gradients are reduced while the chunk's
    last backward of a step runs (--overlap-grad-reduce), so nothing is deferred in it."""
    others = [other for other in range(len(timetable.chunks)) if other != chunk]
    kinds = {half.kind for half in own} | {(half.section, frozenset[str]()) for half in own if reduced_in_backward}
    forward, backward = (
        {(section, off): segments(profile, passing, section, message_bytes, off) for section, off in kinds} for passing in PASSES
    )
    first = (embedding.forward_s if embedding else 0.0, head.forward_s if head else 0.0)
    back = (head.backward_s if head else 0.0, embedding.backward_s if embedding else 0.0)
    host = sum((half.host for half in own), start=NO_HOST_TIME)  # [4]

    def walked(key: PassKey, queue: Queue) -> TimedPass:
        kind, which, last = key
        if kind == "F":
            serving = which if isinstance(which, int) else chunk if which == "steady" else None
            walk = Walk(profile.interference, halves, queue, first[0])
            return _forward(walk, timetable.forward(chunk, serving), own, forward, first[1]).issued_in(host.forward_s)
        assert isinstance(which, str)
        if kind == "R":
            return _received(Walk(1.0, halves, queue), timetable.receive(chunk, which))
        walk = Walk(profile.interference, halves, queue, back[0])
        defers = not (last and reduced_in_backward)
        through = timetable.backward(chunk, which)
        return _backward(walk, through, own, backward, back[1], last, defers).issued_in(host.backward_s)

    def plain(key: PassKey) -> PassKey:
        """The first of all keys whose passes are alike, so that none is walked twice."""
        kind, which, last = key
        if isinstance(which, int):
            return key
        if kind == "F":
            return kind, which if which == "steady" and timetable.forward(chunk, chunk).hides else "warmup", last
        alike = timetable.backward if kind == "B" else timetable.receive
        return kind, next(each for each in PHASES if alike(chunk, each) == alike(chunk, which)), last

    filled = Filled(walked, lambda pending: Queue(*deferral, pending), plain, frozenset(others))
    if any(half.deferred for half in timetable.all_halves):
        return ChunkPasses(filled=filled)
    return ChunkPasses(
        forward=Walked(filled, "F", PHASES),
        backward=Walked(filled, "B", PHASES),
        received=Walked(filled, "R", PHASES),
        hiding=Walked(filled, "F", tuple(others)),
    )


def segments(
    profile: Profile, passing: Passing, section: Section, message_bytes: int, deferred: Collection[str] = ()
) -> Segments:
    """How a section's seconds lie around its windows: where each one is, the section's collectives say. `deferred`: linears whose
    weight gradients are put off, so that they are not among these seconds."""
    windows_s = window_lengths_s(profile, passing, section, message_bytes, deferred)
    waited, items = windows_of(profile, section, passing), profile.of(section).items
    if passing == "fwd":
        return _with_rest(profile, passing, section, Segments(tuple(_between_forward(items, section, waited)), windows_s))
    off = {linear: weight_gradient(profile, section, linear).seconds for linear in deferred}
    left = {name: _without(item, off[name]) if name in off else item for name, item in items.items()}
    ends = {each: min(section.behind_wgrad(each, profile.shape.sequence_parallel), len(waited)) for each in section.linears}
    parts = Segments(tuple(_between_backward(left, section, waited)), windows_s, ends, _before_core(left, section, waited))
    return _with_rest(profile, passing, section, parts, sum(off.values()))


def _with_rest(profile: Profile, passing: Passing, section: Section, parts: Segments, off_s: float = 0.0) -> Segments:
    """What experts wait for and is no window counts as compute, at the end of the pass. `off_s`: what of it is put off."""
    if not section.exchanges:
        return parts
    half = profile.of(section)
    whole_s = (half.forward_s if passing == "fwd" else half.backward_s) - off_s
    *compute_s, last_s = parts.compute_s
    rest_s = max(0.0, whole_s - sum(parts.windows_s) - sum(compute_s) - last_s)
    return replace(parts, compute_s=(*compute_s, last_s + rest_s))


def _without(item: ItemProfile, wgrad_s: float) -> ItemProfile:
    """A linear without its weight gradient."""
    return item.model_copy(update={"backward_s": max(0.0, item.backward_s - wgrad_s), "wgrad_s": 0.0})


def _between_forward(items: Mapping[str, ItemProfile], section: Section, waited: Waited) -> Iterator[float]:
    cuts = [section.place_behind(collective) + 1 for collective in waited]
    for begin, end in pairwise([0, *cuts, len(section.names)]):
        yield sum(items[name].forward_s for name in section.names[begin:end])


def _between_backward(items: Mapping[str, ItemProfile], section: Section, waited: Waited) -> Iterator[float]:
    """What is waited for beside the dgrad of a linear has its wgrad behind it."""
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
    cuts = [place for each in waited if (place := section.place_behind(each)) > at]
    return len(cuts), _backward_s(items, section, at + 1, cuts[-1] if cuts else len(section.names))


def _backward_s(items: Mapping[str, ItemProfile], section: Section, begin: int, end: int) -> float:
    """Backward seconds of some items. Those between norm and residual addition are summed up as one where no window cuts them."""
    stretches = groupby(section.names[begin:end], key=section.on_own_rows.__contains__)
    return sum(sum(items[name].backward_s for name in names) for _, names in stretches)


def _forward(walk: Walk, through: Pass, treated: Sequence[Treated], halves: Parts, end_s: float) -> TimedPass:
    """One forward. `treated`: the halves through which it goes."""
    going = GoingOut() if _leave(treated) else None
    for number, (half, planned) in enumerate(zip(treated, through.halves, strict=True), start=1):
        start_s = walk.clock_s
        parts = halves[half.kind]
        for ordinal, compute_s in enumerate(parts.compute_s):
            walk.compute(compute_s)
            if ordinal < len(parts.windows_s):
                wait = _wait(planned, "fwd", ordinal)
                walk.window(wait, parts.windows_s[ordinal], through.at("in", wait.window), through.at("after", wait.window))
        walk.hold(half.memory.resident)
        walk.half("forward", start_s, half)
        if going is not None:
            going.half_ends(walk, number, half)  # [6]
    walk.compute(end_s)
    return walk.over()


def _wait(planned: HalfPass, passing: Passing, ordinal: int) -> Wait:
    """The wait of this number. Exchanges of experts that a plan may not look into are in no timetable."""
    return planned.waits[ordinal] if ordinal < len(planned.waits) else Wait(WindowAddress(passing, *planned.half, ordinal))


def _backward(
    walk: Walk, through: Pass, treated: Sequence[Treated], halves: Parts, end_s: float, last: bool, defers: bool
) -> TimedPass:
    """One backward. `treated`: the halves, in the order of a forward. `last`: the chunk's last one in a step, behind which
    nothing stays deferred. `defers`: whether it defers anything itself."""
    coming = ComingBack(treated) if _leave(treated) else None
    numbered = reversed(list(enumerate(treated, start=1)))
    not_in_hand = [half.memory.less_in_hand for half in treated] or [0]
    walk.hold(-not_in_hand[-1])
    for (number, half), planned in zip(numbered, through.halves, strict=True):
        if coming is not None:
            coming.half_begins(walk, number, half)  # [6]
        for task in (*through.at("demand", planned.half), *through.at("enter", planned.half)):
            if coming is not None:
                coming.needed(walk, walk.halves[task.half])
            walk.on_demand(task)
        start_s = walk.clock_s
        kind = half.kind if defers else (half.section, frozenset())
        over_bytes = half.memory.less_in_hand - (not_in_hand[number - 2] if number > 1 else 0)
        _back_through(walk, half, through, planned, halves[kind], defers, coming, over_bytes)
        walk.half("backward", start_s, half)
    walk.compute(end_s)
    if last:
        walk.flush()
    return walk.over()


def _leave(treated: Sequence[Treated]) -> bool:
    """Whether any of them goes to the host within its micro-batch."""
    return any(half.leaving is not None for half in treated)


def _back_through(
    walk: Walk,
    half: Treated,
    through: Pass,
    planned: HalfPass,
    parts: Segments,
    defers: bool,
    coming: ComingBack | None,
    over_bytes: int,
) -> None:
    """One half's backward, from its first segment to its last. `over_bytes`: how much more is in hand when it is over, by what
    counts of the next one."""
    last, left, regenerated = len(parts.windows_s) - 1, half.memory.whole, half.memory.regenerated
    for ordinal, compute_s in enumerate(parts.compute_s):
        begins, before_s = parts.core
        _compute(walk, compute_s, through.at("core", planned.half) if ordinal == begins else (), before_s)
        ran_s = _defer(walk, half, ordinal, parts, defers)
        if ordinal == last:  # [3]
            first = max(0, min(regenerated, left - half.memory.tail))
            walk.hold(half.memory.tail - left, regenerated_bytes=-first)
            left, regenerated = half.memory.tail, regenerated - first
            _hold_rest(walk, half, *_let_go_of(half.section))
        if ordinal <= last:
            wait = _wait(planned, "bwd", ordinal)
            during, after = through.at("in", wait.window), through.at("after", wait.window)
            if coming is not None:
                coming.ahead(walk, [walk.halves[task.half] for task in (*during, *after) if task.do in ("recompute", "begin")])
            walk.window(wait, max(0.0, parts.windows_s[ordinal] - ran_s - half.spared_s(wait.gathered)), during, after)
    walk.hold(over_bytes - left, regenerated_bytes=-regenerated)
    _hold_rest(walk, half, *half.deferred)


def _compute(walk: Walk, seconds: float, tasks: Sequence[Task], before_s: float) -> None:
    """The time between two windows. `tasks`: those in it, after so many seconds."""
    if tasks:
        walk.compute(before_s)
        seconds -= before_s
    for task in tasks:
        walk.on_demand(task)
    walk.compute(seconds)


def _let_go_of(section: Section) -> tuple[str, ...]:
    """The linears whose inputs a half lets go of in its last window: its last one's, or those of all experts."""
    if section.exchanges:
        waits = len(section.exchanges_of["bwd"])
        return tuple(linear for linear in section.linears if section.behind_wgrad(linear, False) < waits)
    return section.linears[-1:]


def _hold_rest(walk: Walk, half: Treated, *linears: str) -> None:
    """From now on these linears' entries hold by themselves what their half held until now."""
    for linear in linears:
        if linear in half.deferred:
            walk.holds(Linear(half.layer, half.half, linear), half.deferred[linear].bytes)


def _defer(walk: Walk, half: Treated, ordinal: int, parts: Segments, defers: bool) -> float:
    """Puts off the weight gradients of the linears whose backward ends with this segment, which is the one before the window
    `ordinal`; the seconds of others that then run beside that window's collective, because they no longer fit, or because this
    backward puts none off: then those that a linear has left come right before its own."""
    ran_s, section = 0.0, half.section
    for linear, cost in half.deferred.items():
        if ordinal == parts.ends[linear]:
            of, reduces = Linear(half.layer, half.half, linear), not section.exchanges and linear != section.row_parallel
            ran = walk.defer(of, cost) if defers else walk.catch_up(of)
            if reduces:
                ran_s += ran
            if not reduces or ordinal < len(parts.windows_s) - 1:
                walk.holds(of, cost.gradient_bytes)
    return ran_s


def _received(walk: Walk, through: Pass) -> TimedPass:
    """The replays, then the weight gradients, that run while the gradient is received."""
    during = through.at("in", RECV_BACKWARD)
    for task in recomputed(during):
        half = walk.halves[task.half]
        part = half.part(task)
        walk.regenerate(part.taken_bytes)
        walk.replay(half, part.seconds, RECV_BACKWARD)
    walk.received(during)
    return walk.over()
