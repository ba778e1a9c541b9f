"""Waits of a chunk's layers, with the time that recomputation leaves in them, the weight gradients that may run there, and the
memory that is left for them.

backward of layer l    bwd.mlp.0 │ linear_fc2 │ bwd.mlp.1 │ linear_fc1 │ bwd.mlp.2   bwd.attention.0 │ linear_proj │ ...
linear_fc2 of l                               └──────────────── may run in these, then in bwd.mlp.0 of l - 1 ──>
any linear of l        and in the next forward, in the collectives of its own layer
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from megatron_lynx.anatomy import HALVES, Half, Section
from megatron_lynx.anatomy.address import FrameKey, Window, WindowAddress, window_name
from megatron_lynx.cost.section import Prices, WeightGradient
from megatron_lynx.once import once
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.plan.timetables import layout_of, planned_halves
from megatron_lynx.planner.packing import LONG, Linear, Put, Wait
from megatron_lynx.rehearsal import treated_halves
from megatron_lynx.simulator.simulation import Executed, Simulation
from megatron_lynx.timetable import Timetable

PIECES = (2, 4)
"""Numbers of pieces that are tried. More gain nothing (`design/value.md`: four fill every wait), and are GEMMs of less
efficiency."""


@dataclass(frozen=True)
class Rooms:
    """Waits of one chunk. `forwards`: whether a forward of this chunk follows its backwards. `looked_into`: whether plans may
    change the inside of experts. `pieces`: whether weight gradients may be cut."""

    plan: Plan
    entry: Stage
    prices: Prices
    forwards: bool
    looked_into: bool = True
    pieces: bool = False

    def waits(self, layer: int) -> tuple[Wait, ...]:
        """Waits of one layer in order, those of its backward first."""
        return tuple(self._by_layer.get(layer, {}).values())

    def linears(self, layer: int) -> tuple[Linear, ...]:
        """Linears of one layer in backward order."""
        return self._linears[layer]

    @once
    def cost(self, linear: str) -> WeightGradient:
        return self.prices.weight_gradient(self._section_of[linear], linear)

    def half_of(self, linear: str) -> Half:
        return self._section_of[linear].half

    def _deferrable(self, section: Section) -> tuple[str, ...]:
        if section.captured or section.apart:
            return ()
        return section.linears if self.looked_into or not section.exchanges else ()

    def _addresses(self, layer: int) -> list[WindowAddress]:
        return list(self._by_layer.get(layer, ()))

    @cached_property
    def _linears(self) -> dict[int, tuple[Linear, ...]]:
        alike: dict[object, tuple[Linear, ...]] = {}
        linears = {}
        for layer in self.entry.layers:
            kind = self.plan.model.sections_of(layer), self._places(layer), self._places(layer - 1)
            if kind not in alike:
                alike[kind] = tuple(
                    self._linear(layer, section, name)
                    for section in reversed(self.plan.model.sections_of(layer))
                    for name in reversed(self._deferrable(section))
                )
            linears[layer] = alike[kind]
        return linears

    def _places(self, layer: int) -> tuple[object, ...]:
        """Waits of one layer, without the layer's number."""
        return tuple(at[:1] + at[2:] for at in self._addresses(layer))

    @cached_property
    def _by_layer(self) -> dict[int, dict[WindowAddress, Wait]]:
        """Waits of each layer, without exchanges that take no time."""
        timetable = Timetable([tuple(planned_halves(self.entry, self.plan.model.sections_of))], layout_of(self.plan))
        halves = {half.planned.key: half for half in treated_halves(self.entry, timetable.chunks[0], self.prices)}
        passes = [timetable.backward(0, "steady"), *([timetable.forward(0)] if self.forwards else [])]
        waits_of_layers: dict[int, dict[WindowAddress, Wait]] = {}
        waits = (
            (timed_pass, wait) for timed_pass in passes for half in timed_pass.halves for wait in half.waits if not wait.over
        )
        for through, at in ((timed_pass, wait.window) for timed_pass, wait in waits):
            assert isinstance(at, WindowAddress)
            section = halves[at.frame].section
            seconds = self.prices.windows_s(at.passing, section, section.linears)[at.ordinal]
            if seconds or not section.exchanges:
                filled_s = sum(halves[task.half].part(task).seconds for task in through.at("in", at) if task.do == "recompute")
                name = window_name(at.passing, at.half, at.ordinal)
                waits_of_layers.setdefault(at.layer, {})[at] = Wait(name, seconds, filled_s)
        return waits_of_layers

    def _linear(self, layer: int, section: Section, name: str) -> Linear:
        waits, sliced = self._addresses(layer), self.prices.profile.shape.sequence_parallel
        waits_of_half = [at for at, wait in enumerate(waits) if wait.passing == "bwd" and wait.half == section.half]
        hides = section.beside_wgrad(name, sliced)
        beside = next((at for at in waits_of_half if waits[at].ordinal == hides), None)
        first = self._first(waits, section, name)
        cost = self.cost(name)
        numbers = [1, *(pieces for pieces in PIECES if self.pieces and pieces <= cost.most_pieces)]
        cuts = tuple(tuple(piece.seconds for piece in cost.cut(pieces)) for pieces in numbers)
        return Linear(name, cost.bytes, beside, tuple(self._puts(layer, waits, first)), cuts)

    def _first(self, waits: list[WindowAddress], section: Section, name: str) -> int:
        """Index of the first wait of the layer's backward after which this weight gradient could run; their number if there is
        none."""
        sliced = self.prices.profile.shape.sequence_parallel
        least = section.behind_wgrad(name, sliced) + (section.beside_wgrad(name, sliced) is not None)
        over, backward = HALVES[HALVES.index(section.half) + 1 :], (wait for wait in waits if wait.passing == "bwd")
        return sum(wait.half in over or (wait.half == section.half and wait.ordinal < least) for wait in backward)

    def _puts(self, layer: int, waits: list[WindowAddress], first: int) -> Iterator[Put]:
        """Yield waits in which a weight gradient of this layer may run: from index `first` on, then earlier ones in the layer
        below."""
        backward = sum(wait.passing == "bwd" for wait in waits)
        for at, wait in enumerate(waits):
            if wait.passing == "fwd":
                yield Put(at, window_name("fwd", wait.half, wait.ordinal), LONG)
            elif at >= first:
                yield Put(at, window_name("bwd", wait.half, wait.ordinal), at - first)
            elif wait._replace(layer=layer - 1) in self._addresses(layer - 1):
                yield Put(at, window_name("bwd", wait.half, wait.ordinal, -1), at + backward - first)

    @cached_property
    def _section_of(self) -> dict[str, Section]:
        """By linear."""
        sections = dict.fromkeys(section for layer in self.entry.layers for section in self.plan.model.sections_of(layer))
        return {linear: section for section in sections for linear in section.linears}


class Slack:
    """Bytes left for delayed weight gradients of one chunk, from one of its backwards to the end of the next forward, if any.

    held   ╲  backward k         ╱ forward      ╲  backward k + 1          budget less bytes held, by moment; an entry that waits
            ╲________.........../                ╲_______                  from one moment to another takes its bytes at every
            └── an entry may wait here ──┘                                 moment between them
    """

    def __init__(
        self, simulation: Simulation, entry: Stage, first_layers: Sequence[int], budget_bytes: int, *, drains: bool = False
    ) -> None:
        """`first_layers`: of all chunks of the stage. `budget_bytes`: of the stage's layers. `drains`: of its first backward in
        cool-down, or else its last."""
        followed = None if drains else next_forward(simulation, entry.stage, entry.chunk)
        backward, behind = followed or _alone(simulation, entry, drains=drains)
        curve = simulation.memory(entry.stage)
        self._moved = first_layers[behind.action.chunk] - entry.layers.first
        first, end = bisect_right(curve.times_s, backward.start_s) - 1, bisect_right(curve.times_s, behind.end_s)
        self.sent_s, self.end_s = backward.end_s, behind.end_s
        self._times_s = list(curve.times_s[first:end])
        self._left = budget_bytes - np.array(curve.bytes[first:end], dtype=np.int64)
        self._taken = np.zeros_like(self._left)
        self._halves: dict[tuple[str, FrameKey], tuple[float, float]] = {}
        self._windows: dict[str, float] = {}
        for execution in (backward, behind):
            self._enter(execution)

    def _enter(self, execution: Executed) -> None:
        for span in execution.content.spans:
            start_s, end_s = execution.start_s + span.start_s, execution.start_s + span.end_s
            if span.kind == "window":
                self._windows[span.name] = start_s
            elif span.layer is not None and span.half is not None:
                self._halves[span.kind, (span.layer, span.half)] = start_s, end_s  # type: ignore[index]

    def begins_s(self, half: FrameKey) -> float:
        return self._halves["backward", half][0]

    def opens_s(self, window: Window) -> float:
        """Time at which a wait is reached; the end of its half if it takes no time."""
        if not isinstance(window, WindowAddress):
            return self.end_s
        if window.passing == "bwd":
            return self._windows.get(str(window), self._halves["backward", window.frame][1])
        window = window._replace(layer=window.layer + self._moved)  # the forward may be another chunk's
        return self._windows.get(str(window), self._halves.get(("forward", window.frame), (0.0, self.end_s))[1])

    def takes(self, size_bytes: int, from_s: float, until_s: float) -> bool:
        """Take bytes between two times if they fit; return whether they do."""
        chosen = self._between(from_s, until_s)
        if self._left[chosen].min(initial=size_bytes) < size_bytes:
            return False
        self._take(chosen, size_bytes)
        return True

    def gives_back(self, size_bytes: int, from_s: float, until_s: float) -> None:
        self._take(self._between(from_s, until_s), -size_bytes)

    @property
    def most_taken_bytes(self) -> int:
        return int(self._taken.max(initial=0))

    def _take(self, chosen: slice, size_bytes: int) -> None:
        self._left[chosen] -= size_bytes
        self._taken[chosen] += size_bytes

    def _between(self, from_s: float, until_s: float) -> slice:
        return slice(max(0, bisect_right(self._times_s, from_s) - 1), bisect_right(self._times_s, until_s))


def next_forward(simulation: Simulation, stage: int, chunk: int) -> tuple[Executed, Executed] | None:
    """Return a backward of a chunk that is followed by a forward of any chunk, with that forward; None if there is none."""
    passes = [execution for execution in simulation.executed[stage] if execution.action.is_pass]
    kinds = ("B", chunk), "F"
    pairs = [pair for pair in pairwise(passes) if (pair[0].action[1:], pair[1].action.kind) == kinds]
    return pairs[len(pairs) // 2] if pairs else None


def _alone(simulation: Simulation, entry: Stage, *, drains: bool) -> tuple[Executed, Executed]:
    """The first backward of a chunk that no forward follows. `drains`: in cool-down, or the last one."""
    backwards = [
        execution
        for execution in simulation.holding(entry.stage)
        if execution.action.kind == "B" and execution.action.chunk == entry.chunk
    ]
    in_cooldown = (execution for execution in backwards if execution.phase == "cooldown")
    backward = next(in_cooldown, backwards[-1]) if drains else backwards[0]
    return backward, backward
