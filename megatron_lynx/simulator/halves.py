"""The passes of a stage from its layer halves: what runs, where it waits, what is replayed meanwhile, what that holds.

   forward    [ norm, column-parallel, ..., row-parallel ] (fwd.0) [ dropout, residual ]
   backward   [ residual, dropout, row-parallel, ..., column-parallel ] (bwd.0) [ norm ]

   with       forward    [ norm ] (fwd.0) [ column-parallel ... row-parallel ] (fwd.1) [ dropout, residual ]
   sequence   backward   [ residual, dropout ] (bwd.0) [ row-parallel ... dgrad ] (bwd.1) [ wgrad ] (bwd.2) [ norm ]
   parallelism

[1] a half that is replayed on demand is replayed when backward enters it; its gather, as far as it delays, comes before
[2] in a window the replays run first, then what is left of the window is waited for
[3] in its last window a half lets go of all but what its last GEMM reads (`cost.memory`), then the next one is regenerated
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.items import COLUMN_PARALLEL, HALVES, ITEMS_OF, ROW_PARALLEL, Half
from megatron_lynx.schedule.schedule import Phase
from megatron_lynx.schedule.windows import ON_DEMAND, RECV_BACKWARD, Collective, Window
from megatron_lynx.simulator.passes import PHASES, ChunkPasses, Pass
from megatron_lynx.simulator.timeline import Span

if TYPE_CHECKING:
    from megatron_lynx.profiler.profile import BlockSeconds, Profile


@dataclass(frozen=True)
class Treated:
    """What becomes of one half: where its replay runs by phase, how long it takes, what it holds."""

    layer: int
    half: Half
    memory: HalfMemory
    replay_s: float = 0.0
    """0 for a half that is kept."""
    steady: Window = "on_demand"
    cooldown: Window = "on_demand"
    gather_s: float = 0.0
    """Seconds by which gathering the replay's input delays it."""
    gathered_bytes: int = 0
    """Of what is regenerated: the gathered input, which is there first."""

    @property
    def replayed(self) -> bool:
        return self.replay_s > 0 or self.memory.regenerated > 0

    def window(self, phase: Phase) -> Window:
        """Where the replay runs for a backward of this phase. Behind a forward that hides nothing it is on demand instead."""
        window = self.cooldown if phase == "cooldown" else self.steady
        missed = phase == "warmup" and isinstance(window, Collective) and window.passing == "fwd"
        return "on_demand" if missed else window


@dataclass(frozen=True)
class Segments:
    """One half in one pass: seconds of compute, between them its windows."""

    compute_s: tuple[float, ...]
    windows_s: tuple[float, ...]


def stage_passes(
    treated: Sequence[Treated],
    profile: Profile,
    message_bytes: int,
    embedding: BlockSeconds | None = None,
    head: BlockSeconds | None = None,
) -> ChunkPasses:
    """The passes of one stage. `treated`: its halves in forward order. `embedding`, `head`: on the stages that have them."""
    forward: dict[Half, Segments] = {half: segments(profile, "fwd", half, message_bytes) for half in HALVES}
    backward: dict[Half, Segments] = {half: segments(profile, "bwd", half, message_bytes) for half in HALVES}
    first = (embedding.forward_s if embedding else 0.0, head.forward_s if head else 0.0)
    back = (head.backward_s if head else 0.0, embedding.backward_s if embedding else 0.0)
    return ChunkPasses(
        forward={phase: _forward(treated, phase, forward, profile.interference, first) for phase in PHASES},
        backward={phase: _backward(treated, phase, backward, profile.interference, back) for phase in PHASES},
        received={phase: _received(treated, phase) for phase in PHASES},
    )


def segments(profile: Profile, passing: Literal["fwd", "bwd"], half: Half, message_bytes: int) -> Segments:
    """How a half's seconds lie around its windows."""
    items, windows = profile.half(half).items, window_lengths_s(profile, passing, half, message_bytes)
    order = ITEMS_OF[half]
    column = order.index(COLUMN_PARALLEL[half])
    row = next(index for index, item in enumerate(order) if item in ROW_PARALLEL)
    if passing == "fwd":
        cuts = {0: [], 1: [row + 1], 2: [column, row + 1]}[len(windows)]
        seconds = [items[item].forward_s for item in order]
        return Segments(tuple(sum(seconds[a:b]) for a, b in pairwise([0, *cuts, len(order)])), windows)
    back = [items[item].backward_s for item in order]
    wgrad_s = items[COLUMN_PARALLEL[half]].wgrad_s
    norm, inner, end = sum(back[:column]), sum(back[column : row + 1]), sum(back[row + 1 :])
    if not windows:
        return Segments((norm + inner + end,), ())
    if len(windows) == 1:
        return Segments((inner + end, norm), windows)
    return Segments((end, max(0.0, inner - wgrad_s), min(inner, wgrad_s), norm), windows)


class _Walk:
    """One pass as it is written down: the clock, and all that happens."""

    def __init__(self, interference: float, start_s: float = 0.0) -> None:
        self.clock_s = start_s
        self._interference = interference
        self._spans: list[Span] = []
        self._memory: list[tuple[float, int]] = []
        self._gathered: set[tuple[int, str]] = set()
        self._hidden_s = self._exposed_s = 0.0

    def compute(self, seconds: float) -> None:
        self.clock_s += seconds

    def hold(self, change_bytes: int) -> None:
        if change_bytes:
            self._memory.append((self.clock_s, change_bytes))

    def gather(self, half: Treated | None) -> None:
        """The gathered input of a half that is replayed later is there from now on."""
        if half is not None and half.gathered_bytes:
            self.hold(half.gathered_bytes)
            self._gathered.add((half.layer, half.half))

    def regenerate(self, half: Treated) -> None:
        there_bytes = half.gathered_bytes if (half.layer, half.half) in self._gathered else 0
        self.hold(half.memory.regenerated - there_bytes)

    def replay(self, half: Treated, seconds: float, window: str) -> None:
        """So much of a half's replay, where it is drawn: what no window hides counts as on demand."""
        if seconds:
            start_s, self.clock_s = self.clock_s, self.clock_s + seconds
            self._span("replay", start_s, half, window)

    def on_demand(self, half: Treated) -> None:  # [1]
        if half.gather_s:
            start_s, self.clock_s = self.clock_s, self.clock_s + half.gather_s
            self._span("gather", start_s, half)
        self.regenerate(half)
        self.replay(half, half.replay_s, ON_DEMAND)
        self._exposed_s += half.replay_s + half.gather_s

    def window(self, window: Collective, seconds: float, served: Sequence[Treated]) -> None:  # [2]
        start_s, room_s = self.clock_s, seconds / self._interference
        for half in served:
            self.regenerate(half)
            fits_s = min(half.replay_s, room_s)
            room_s -= fits_s
            self.replay(half, fits_s * self._interference, str(window))
            self.replay(half, half.replay_s - fits_s, ON_DEMAND)
            self._hidden_s += fits_s
            self._exposed_s += half.replay_s - fits_s + half.gather_s
        self.clock_s = max(self.clock_s, start_s + seconds) + sum(half.gather_s for half in served)
        if self.clock_s > start_s:
            self._spans.append(Span("window", start_s, self.clock_s, window.layer, window.half, None, str(window), str(window)))

    def half(self, kind: Literal["forward", "backward"], start_s: float, half: Treated) -> None:
        self._span(kind, start_s, half)

    def over(self) -> Pass:
        return Pass(self.clock_s, self._hidden_s, self._exposed_s, tuple(self._memory), tuple(self._spans))

    def _span(
        self, kind: Literal["forward", "backward", "replay", "gather"], start_s: float, half: Treated, window: str | None = None
    ) -> None:
        name = f"{kind} {half.half}({half.layer})"
        self._spans.append(Span(kind, start_s, self.clock_s, half.layer, half.half, None, window, name))


def _forward(
    treated: Sequence[Treated], phase: Phase, segments: dict[Half, Segments], interference: float, ends_s: tuple[float, float]
) -> Pass:
    walk = _Walk(interference, ends_s[0])
    served = _served(treated, "steady") if phase == "steady" else {}
    for half in treated:
        start_s = walk.clock_s
        parts = segments[half.half]
        for ordinal, compute_s in enumerate(parts.compute_s):
            walk.compute(compute_s)
            if ordinal < len(parts.windows_s):
                place = Collective("fwd", half.layer, half.half, ordinal)
                walk.window(place, parts.windows_s[ordinal], served.get(place, ()))
        walk.hold(half.memory.resident)
        walk.half("forward", start_s, half)
    walk.compute(ends_s[1])
    return walk.over()


def _backward(
    treated: Sequence[Treated], phase: Phase, segments: dict[Half, Segments], interference: float, ends_s: tuple[float, float]
) -> Pass:
    walk = _Walk(interference, ends_s[0])
    served = _served(treated, phase)
    for half, following in pairwise((*reversed(treated), None)):
        assert half is not None
        if half.replayed and half.window(phase) == ON_DEMAND:
            walk.on_demand(half)
        start_s = walk.clock_s
        _back_through(walk, half, following, segments[half.half], served)
        walk.half("backward", start_s, half)
    walk.compute(ends_s[1])
    return walk.over()


def _back_through(
    walk: _Walk, half: Treated, following: Treated | None, parts: Segments, served: dict[Window, tuple[Treated, ...]]
) -> None:
    """One half's backward, from its first segment to its last. The input of `following` is gathered in its last window."""
    last, left = len(parts.windows_s) - 1, half.memory.whole
    for ordinal, compute_s in enumerate(parts.compute_s):
        walk.compute(compute_s)
        if ordinal == last:  # [3]
            walk.hold(half.memory.tail - left)
            left = half.memory.tail
            walk.gather(following)
        if ordinal <= last:
            place = Collective("bwd", half.layer, half.half, ordinal)
            walk.window(place, parts.windows_s[ordinal], served.get(place, ()))
    walk.hold(-left)


def _received(treated: Sequence[Treated], phase: Phase) -> Pass:
    """The replays that run while the gradient is received."""
    walk = _Walk(1.0)
    for half in _served(treated, phase).get(RECV_BACKWARD, ()):
        walk.regenerate(half)
        walk.replay(half, half.replay_s, RECV_BACKWARD)
    return walk.over()


def _served(treated: Iterable[Treated], phase: Phase) -> dict[Window, tuple[Treated, ...]]:
    """Replays by window, those that backward needs first first."""
    served: dict[Window, tuple[Treated, ...]] = {}
    for half in reversed(tuple(treated)):
        if half.replayed:
            window = half.window(phase)
            served[window] = (*served.get(window, ()), half)
    return served
