"""Fills waits that recomputation leaves with weight gradients, which depend on no other rank.

    the plan, rehearsed ──> time left in each wait      ──packing──> the best ways to fill each layer's waits
                        └─> memory left in the budget   ──Filling──> the layers for which there is memory
                                                               └──> the plan with weight gradients in waits

Each layer first gets weight gradients that wait for a window of the same backward, which hold little; then, while memory lasts,
those that wait for a forward: the largest gain per byte first, of equals the lowest layer, whose weight gradients wait shortest.
Those may also run in the receive of a gradient, because cool-down has no forwards.

With several chunks, the forward is the next one of any chunk, and receives are not used, so in cool-down they run at the end.
That may cost more than it gains, so plans without forwards are tried as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf
from typing import Any

import numpy as np

from megatron_lynx.anatomy import HALVES, Section
from megatron_lynx.anatomy.address import (
    RECV_BACKWARD,
    SEND_BACKWARD,
    Window,
    WindowAddress,
    is_forward,
    window_at,
    window_name,
)
from megatron_lynx.config.job import Job
from megatron_lynx.cost.section import Prices, WeightGradient
from megatron_lynx.cost.stage import cooldown_backwards
from megatron_lynx.once import once
from megatron_lynx.plan.facts import LayerRange
from megatron_lynx.plan.plan import Plan, Stage, WeightGradients
from megatron_lynx.plan.rule import joined
from megatron_lynx.plan.timetables import layout_of, planned_halves
from megatron_lynx.planner.packing import Linear, Loads, Placed, Put, ways_of
from megatron_lynx.rehearsal import treated_halves
from megatron_lynx.simulator.simulation import Executed, Simulation
from megatron_lynx.timetable import Timetable
from megatron_lynx.units import MIB

PASS_NAMES = {"fwd": "forward", "bwd": "backward"}

PIECES = (2, 4)
"""Numbers of pieces that are tried. Four fill every wait; more are GEMMs of less efficiency."""


@dataclass(frozen=True)
class Rooms:
    """Waits of one chunk.

    backward of layer l    bwd.mlp.0 │ linear_fc2 │ bwd.mlp.1 │ linear_fc1 │ bwd.mlp.2   bwd.attention.0 │ linear_proj │ ...
    linear_fc2 of l                               └──────────────── may run in these, then in bwd.mlp.0 of l - 1 ──>
    any linear of l        and in the next forward, in the collectives of the same layer

    `forwards`: whether a forward of this chunk follows its backwards. `looked_into`: whether plans may change the inside of
    experts.
    """

    plan: Plan
    entry: Stage
    prices: Prices
    forwards: bool
    looked_into: bool = True

    def loads(self, layer: int) -> Loads:
        """Waits of its backward first."""
        lengths_s, filled_s = zip(*waits, strict=True) if (waits := self._by_layer.get(layer, {}).values()) else ((), ())
        return Loads(lengths_s, filled_s, self.prices.profile.interference)

    @once
    def linears(self, layer: int) -> tuple[Linear, ...]:
        """In backward order."""
        sections = [
            section
            for section in reversed(self.plan.model.sections_of(layer))
            if not (section.captured or section.apart or (section.exchanges and not self.looked_into))
        ]
        return tuple(self._linear(layer, section, name) for section in sections for name in reversed(section.linears))

    def cost(self, linear: str) -> WeightGradient:
        return self.prices.weight_gradient(self.section_of[linear], linear)

    @cached_property
    def parts(self) -> tuple[LayerRange, ...]:
        """Layers that are treated alike: of checkpoints of several layers, else one each."""
        return tuple(part for rule in self.entry.rules for part in rule.parts)

    @cached_property
    def section_of(self) -> dict[str, Section]:
        """By linear."""
        sections = dict.fromkeys(section for layer in self.entry.layers for section in self.plan.model.sections_of(layer))
        return {linear: section for section in sections for linear in section.linears}

    @cached_property
    def _by_layer(self) -> dict[int, dict[WindowAddress, tuple[float, float]]]:
        """Seconds of each layer's waits, and of recomputation in them; without exchanges that take no time."""
        timetable = Timetable([tuple(planned_halves(self.entry, self.plan.model.sections_of))], layout_of(self.plan))
        halves = {half.planned.key: half for half in treated_halves(self.entry, timetable.chunks[0], self.prices)}
        waits: dict[int, dict[WindowAddress, tuple[float, float]]] = {}
        for through in (timetable.backward(0), *([timetable.forward(0)] if self.forwards else [])):
            for at in (wait.window for half in through.halves for wait in half.waits if not wait.over):
                assert isinstance(at, WindowAddress)
                section = halves[at.frame].section
                seconds = self.prices.windows_s(at.passing, section, section.linears)[at.ordinal]
                if seconds or not section.exchanges:
                    recomputed = (halves[task.half].part(task) for task in through.at("in", at) if task.do == "recompute")
                    waits.setdefault(at.layer, {})[at] = seconds, sum(part.seconds for part in recomputed)
        return waits

    def _linear(self, layer: int, section: Section, name: str) -> Linear:
        """Its places: waits of its layer's backward after it, then those before it in the layer below, then those of the next
        forward, for which it waits longer than for any other."""
        sliced, waits = self.prices.profile.shape.sequence_parallel, list(self._by_layer.get(layer, ()))
        own = [at for at in waits if at.passing == "bwd"]
        hides = section.beside_wgrad(name, sliced)
        behind = HALVES.index(section.half), -section.behind_wgrad(name, sliced) - (hides is not None)
        first = sum((HALVES.index(at.half), -at.ordinal) > behind for at in own)
        below = self._by_layer.get(layer - 1, ())
        names = [window_name(at.passing, at.half, at.ordinal) for at in waits]
        hidden = [Put(place, names[place], 0) for place, at in enumerate(own) if (at.half, at.ordinal) == (section.half, hides)]
        puts = [Put(place, names[place], place - first) for place in range(first, len(own))]
        for place, at in enumerate(own[:first]):
            if at._replace(layer=layer - 1) in below:
                puts.append(Put(place, window_name("bwd", at.half, at.ordinal, -1), place + len(own) - first))
        puts += [Put(place, names[place], 2 * len(waits)) for place in range(len(own), len(waits))]
        cost = self.cost(name)
        cuts = ((pieces, cost.cut(pieces)[0].seconds) for pieces in (1, *PIECES) if pieces <= cost.most_pieces)
        return Linear(name, hidden[0] if hidden else None, tuple(puts), tuple(cuts))


Waits = Mapping[str, tuple[str, ...]]
"""By deferred linear, the wait of each piece."""


class Filling:
    """Delayed weight gradients of one chunk, and the bytes left for them from a backward to the end of the next forward, if any.

    held   ╲  backward k         ╱ forward      ╲  backward k + 1          budget less bytes held, by moment; an entry that waits
            ╲________.........../                ╲_______                  from one moment to another takes its bytes at every
            └── an entry may wait here ──┘                                 moment between them
    """

    def __init__(self, rooms: Rooms, simulation: Simulation, through: tuple[Executed, Executed], budget_bytes: int) -> None:
        """`through`: the backward, and the last pass in which its weight gradients may run. `budget_bytes`: of the stage's
        layers."""
        (backward, last), entry, curve = through, rooms.entry, simulation.memory(rooms.entry.stage)
        first, end = bisect_right(curve.times_s, backward.start_s) - 1, bisect_right(curve.times_s, last.end_s)
        self._rooms, self._end_s, self._times_s = rooms, last.end_s, list(curve.times_s[first:end])
        self._free = budget_bytes - np.array(curve.bytes[first:end], dtype=np.int64)
        self._taken = np.zeros_like(self._free)
        self._moved = rooms.plan.chunks_of(entry.stage)[last.action.chunk].layers.first - entry.layers.first
        self._chosen: dict[int, Waits] = {}
        self._spans: dict[object, tuple[float, float]] = {}
        for execution in through:
            for span in execution.content.spans:
                what = span.name if span.kind == "window" else (span.kind, span.layer, span.half)
                self._spans[what] = execution.start_s + span.start_s, execution.start_s + span.end_s

    def holds(self, layers: LayerRange, waits: Waits) -> bool:
        """Delay these weight gradients of each of the layers, instead of those before, if there is memory for their operands."""
        claimed = self._claimed(layers, waits)
        taken = self._taken - self._claimed(layers, self._chosen.get(layers.first, {})) + claimed
        if (taken > self._free)[claimed > 0].any():
            return False
        self._taken, self._chosen[layers.first] = taken, waits
        return True

    def _claimed(self, layers: LayerRange, waits: Waits) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes of operands that are held, by moment."""
        claimed = np.zeros_like(self._free)
        for layer, (linear, each) in product(layers, waits.items()):
            begins_s, _ = self._spans[("backward", layer, self._rooms.section_of[linear].half)]
            opens_s = max(self._opens_s(window_at(wait, layer)) for wait in each)
            first = max(0, bisect_right(self._times_s, begins_s) - 1)
            claimed[first : bisect_right(self._times_s, opens_s)] += self._rooms.cost(linear).bytes
        return claimed

    def _opens_s(self, window: Window) -> float:
        """Time at which a wait is reached; the end of its half if it takes no time."""
        if not isinstance(window, WindowAddress):
            return self._end_s
        if window.passing == "fwd":  # may be another chunk's
            window = window._replace(layer=window.layer + self._moved)
        _, half_end_s = self._spans.get((PASS_NAMES[window.passing], *window.frame), (0.0, self._end_s))
        return self._spans.get(str(window), (half_end_s,))[0]

    def entry(self, *, receives: bool = False) -> Stage:
        """The plan's entry with these weight gradients added, and a bound of their bytes. `receives`: whether those that wait for
        a forward also run in receives."""
        entry, rules = self._rooms.entry, []
        for part in self._rooms.parts:
            rule, waits = entry.rule_for(part.first), self._chosen.get(part.first, {})
            deferred = {linear: _waits(each, receives) for linear, each in waits.items()}
            pieces = {linear: len(each) for linear, each in waits.items() if len(each) > 1}
            changes = {
                "layers": part,
                "weight_gradients": rule.weight_gradients | deferred,
                "weight_gradient_pieces": rule.weight_gradient_pieces | pieces,
            }
            rules.append(rule.model_copy(update=changes))
        if not (linears := {linear for waits in self._chosen.values() for linear in waits}):
            return entry
        before = 0 if entry.weight_gradients is None else entry.weight_gradients.bytes
        taken = int(self._taken.max(initial=0)) + max(self._rooms.cost(linear).bytes for linear in linears)
        bound = WeightGradients(bytes=-(-(before + taken) // MIB) * MIB)
        return entry.model_copy(update={"rules": joined(rules), "weight_gradients": bound})


def _waits(waits: tuple[str, ...], receives: bool) -> tuple[str, ...]:
    return (*waits, *[RECV_BACKWARD] * (sum(map(is_forward, waits)) if receives else 0))


@dataclass(frozen=True)
class Filler:
    """Places the weight gradients of one plan. Budgets are bytes of each stage's layers."""

    plan: Plan
    job: Job
    prices: Prices
    simulation: Simulation

    def filled(self, budgets: Sequence[int], *, forwards: bool, pieces: bool) -> Plan:
        """Return the plan with weight gradients in its waits; unchanged if nothing is gained or fits.

        `forwards`: whether waits of forwards are filled, too. `pieces`: whether weight gradients may be cut.
        """
        entries = []
        for number, entry in enumerate(self.plan.stages):
            through = self._through(entry)
            rooms = self._rooms(number, forwards and through[1] is not through[0])
            filling = Filling(rooms, self.simulation, through, budgets[entry.stage])
            self._fill(rooms, filling, pieces)
            entries.append(filling.entry(receives=self.job.chunks == 1 and cooldown_backwards(self.job, entry.stage) > 0))
        return self.plan.model_copy(update={"stages": tuple(entries)})

    def sending_first(self, budgets: Sequence[int]) -> Plan:
        """Return the plan with weight gradients that run once the gradient of their chunk's input is sent: none waits for them.

        held   ╲  backward k                     the lowest layers first: their operands wait shortest, where memory is freest
                ╲___ linear_fc1(2) ___ ... sent

        In each layer the last one of backward comes first. Operands of experts' linears grow with a rank's rows, also where
        halves fall back: they are not held.
        """
        entries = []
        for number, entry in enumerate(self.plan.stages):
            rooms = self._rooms(number, False)
            filling = Filling(rooms, self.simulation, self._through(entry, drains=True), budgets[entry.stage])
            for part in rooms.parts if entry.stage or entry.chunk else ():
                delayed, sent = entry.rule_for(part.first).weight_gradients, dict[str, tuple[str, ...]]()
                for name in (linear.name for linear in reversed(rooms.linears(part.first))):
                    if name not in delayed and not rooms.section_of[name].of_name[name].of_experts:
                        more = {**sent, name: (SEND_BACKWARD,)}
                        sent = more if filling.holds(part, more) else sent
            entries.append(filling.entry())
        return self.plan.model_copy(update={"stages": tuple(entries)})

    @once
    def _rooms(self, number: int, forwards: bool) -> Rooms:
        return Rooms(self.plan, self.plan.stages[number], self.prices, forwards, not self.job.model.experts_whole)

    def _through(self, entry: Stage, *, drains: bool = False) -> tuple[Executed, Executed]:
        """Return a backward of a chunk, and the last pass in which its weight gradients may run: a forward of any chunk that
        follows it, or itself. `drains`: its first backward in cool-down, or else its last."""
        passes = [execution for execution in self.simulation.executed[entry.stage] if execution.action.is_pass]
        backwards = [at for at, execution in enumerate(passes) if execution.action[1:] == ("B", entry.chunk)]
        followed = [at for at in backwards if at + 1 < len(passes) and passes[at + 1].action.kind == "F"]
        if followed and not drains:
            at = followed[len(followed) // 2]
            return passes[at], passes[at + 1]
        cooldown = [at for at in backwards if passes[at].phase == "cooldown"] or backwards[-1:]
        alone = passes[(cooldown if drains else backwards)[0]]
        return alone, alone

    def _fill(self, rooms: Rooms, filling: Filling, pieces: bool) -> None:
        """Choose the waits of each layer's weight gradients: first those without forwards, then those that gain most per byte."""
        candidates: list[tuple[float, int, LayerRange, Placed]] = []
        for part in rooms.parts:
            linears = tuple(linear._replace(cuts=linear.cuts[: None if pieces else 1]) for linear in rooms.linears(part.first))
            ways = ways_of(rooms.loads(part.first), linears)
            candidates += [(_gain_per_byte(rooms, ways[0], way), -part.first, part, way) for way in ways]
        chosen_s: dict[int, float] = {}
        for *_, part, way in sorted(candidates, key=lambda candidate: candidate[:2], reverse=True):
            if way.seconds < chosen_s.get(part.first, inf) and filling.holds(part, way.waits):
                chosen_s[part.first] = way.seconds


def _gain_per_byte(rooms: Rooms, first: Placed, way: Placed) -> float:
    """Seconds gained over `first`, which has no forwards, by byte that waits for a forward; infinite without such bytes."""
    waiting = [linear for linear, waits in way.waits.items() if any(map(is_forward, waits))]
    return (first.seconds - way.seconds) / sum(rooms.cost(linear).bytes for linear in waiting) if waiting else inf
