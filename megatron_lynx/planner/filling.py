"""Fills waits that recomputation leaves with weight gradients, whole or in pieces, which depend on no other rank.

    the plan, rehearsed ──> time left in each wait      ──ways_of──> the best ways to fill each layer's waits
                        └─> memory left in the budget   ──Filling──> the layers for which there is memory
                                                               └──> the plan with weight gradients in waits

    a layer's waits, in order      bwd.mlp.0   bwd.mlp.2   bwd.attention.0   bwd.attention.2   fwd.attention.0 ...
    recomputation takes            ▓▓▓▓▓▓▓▓    ▓▓          ▓▓▓▓▓▓▓           ▓▓
    weight gradients may take                  ░░░░░░              ░         ░░░░░░            ░░░░░░░░░░░

    seconds of a layer  =  its waits, with the work that exceeds them   +   weight gradients that are not deferred

If not deferred, the column-parallel linear's weight gradient hides the next wait. Lower layers are assumed to be filled like this
one, so a window of the layer below counts as one of this layer's. Work adds to a wait what exceeds it, which is convex. So equal
pieces of one weight gradient, given the others, are placed best one by one, each where it adds least. Weight gradients are placed
anew, one or two at a time, until nothing gets shorter.

Each layer first gets weight gradients that wait for a window of the same backward, which hold little; then, while memory lasts,
those that wait for a forward: the largest gain per byte first, of equals the lowest layer, whose weight gradients wait shortest.
Those may also run in the receive of a gradient, because cool-down has no forwards.

With several chunks, the forward is the next one of any chunk, and receives are not used, so in cool-down they run at the end.
That may cost more than it gains, so plans without forwards are tried as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, combinations, cycle, permutations, product
from math import gcd, inf
from typing import Any, NamedTuple

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
from megatron_lynx.rehearsal import treated_halves
from megatron_lynx.simulator.simulation import Executed, Simulation
from megatron_lynx.solver.problem import WAIT_S
from megatron_lynx.timetable import Timetable
from megatron_lynx.units import MIB

PASS_NAMES = {"fwd": "forward", "bwd": "backward"}

PIECES = (2, 4)
"""Numbers of pieces that are tried. Four fill every wait; more are GEMMs of less efficiency."""

WORTH = 0.01
"""Part of its seconds that deferring a weight gradient must gain. With 0, Llama 3 70B on two thirds of an H100 loses 0.8 %; with
0.02, Mixtral 8x7B on H800 loses 1.9 %."""


class Put(NamedTuple):
    """One place for a weight gradient: a wait's index, and its name relative to the linear's layer."""

    wait: int
    name: str
    windows: int
    """Number of windows that it waits."""


class Linear(NamedTuple):
    name: str
    beside: Put | None
    """The wait that its weight gradient hides if not deferred. Pieces may run there."""
    places: tuple[Put, ...]
    cuts: tuple[tuple[int, float], ...]
    """Possible numbers of pieces, and the seconds of one piece; the whole first."""

    @property
    def seconds(self) -> float:
        return self.cuts[0][1]


class Placed(NamedTuple):
    seconds: float
    """Seconds of the layer's waits and weight gradients together."""
    waits: dict[str, tuple[str, ...]]
    """By deferred linear, the wait of each piece."""


@lru_cache(maxsize=1024)
def ways_of(none: Loads, linears: tuple[Linear, ...]) -> list[Placed]:
    """Return the best assignment found without forwards, each weight gradient of it by itself, then shorter assignments: the best
    of all, and those with forwards for one of the weight gradients that use them there, or for all but one.

    `none`: the layer without weight gradients. If one of them hides a wait, each is placed only with the others.
    """

    def best(forwards: Collection[str]) -> Placed:
        """`forwards`: linears whose weight gradients may use waits of forwards."""
        places = [tuple(put for put in one.places if one.name in forwards or not is_forward(put.name)) for one in linears]
        return _best([one._replace(places=may) for one, may in zip(linears, places, strict=True)], none)

    first, most = best(()), best([linear.name for linear in linears])
    hiding = any(linear.name in first.waits for linear in linears if linear.beside is not None)
    alone = [] if hiding else [first._replace(waits={linear: waits}) for linear, waits in first.waits.items()]
    using = [linear for linear, names in most.waits.items() if any(map(is_forward, names))]
    fewer = chain.from_iterable(combinations(using, size) for size in {1, len(using) - 1} if 0 < size < len(using))
    shorter = (way for way in (most, *map(best, fewer)) if way.seconds < first.seconds)
    return [first, *alone, *shorter]


class Loads(NamedTuple):
    """Waits of a layer with their recomputation, and with weight gradients as they are added."""

    lengths_s: Sequence[float]
    """Seconds of each wait, without the part that a concurrent weight gradient hides."""
    taken_s: Sequence[float]
    """Work in each wait, without interference."""
    interference: float
    alone_s: float = 0.0
    """Seconds of weight gradients that are not deferred, and the least gain of those that are."""

    def beside(self, linear: Linear, puts: tuple[Put, ...]) -> Loads:
        """Return the loads with one more weight gradient, in pieces at these places; not deferred if there are none."""
        lengths_s, taken_s, alone_s = [*self.lengths_s], [*self.taken_s], linear.seconds
        if puts:
            alone_s = WORTH * linear.seconds + WAIT_S * sum([put.windows for put in puts])
            piece_s = dict(linear.cuts)[len(puts)]
            for put in puts:
                taken_s[put.wait] += piece_s
        elif linear.beside is not None:
            lengths_s[linear.beside.wait] = max(0.0, lengths_s[linear.beside.wait] - linear.seconds)
        return Loads(lengths_s, taken_s, self.interference, self.alone_s + alone_s)

    @property
    def rooms_s(self) -> list[float]:
        """Seconds of work for which each wait has room; below 0, of work that exceeds it."""
        return [length_s / self.interference - work_s for length_s, work_s in zip(self.lengths_s, self.taken_s, strict=True)]

    @property
    def seconds(self) -> float:
        """Seconds of all waits, with the work that exceeds them, and of weight gradients."""
        return self.alone_s + sum(self.lengths_s) - sum([room_s for room_s in self.rooms_s if room_s < 0])


def _best(linears: Sequence[Linear], none: Loads) -> Placed:
    """Place one weight gradient anew after another, then two together, until nothing gets shorter. `none`: without any."""
    chosen: dict[str, tuple[Put, ...]] = {linear.name: () for linear in linears}
    least_s, alone = inf, [(linear,) for linear in linears]
    for moves in (alone, [*permutations(linears, 2)]):
        turns, in_vain = cycle(moves), 0
        while in_vain < len(moves):
            anew, loads, moved = next(turns), none, dict(chosen)
            for linear in (linear for linear in linears if linear not in anew):
                loads = loads.beside(linear, chosen[linear.name])
            for linear in anew:
                ways = [(loads.beside(linear, puts), puts) for puts in ((), *_piece_by_piece(linear, loads))]
                loads, moved[linear.name] = min(ways, key=lambda way: way[0].seconds)
            in_vain += 1
            if (seconds := loads.seconds) < least_s - WAIT_S / 2:
                least_s, chosen, in_vain = seconds, moved, 0
    return Placed(least_s, {name: _fewest(puts) for name, puts in chosen.items() if puts})


def _piece_by_piece(linear: Linear, loads: Loads) -> Iterator[tuple[Put, ...]]:
    """Yield the best places of one weight gradient, whole and in pieces. Pieces may also run in the wait that it hides anyway."""
    for pieces, piece_s in linear.cuts:
        places = [linear.beside, *linear.places] if linear.beside and pieces > 1 else linear.places
        if places:
            puts, left_s = list[Put](), [max(0.0, room_s) for room_s in loads.rooms_s]
            for _ in range(pieces):
                puts.append(min(places, key=lambda put: max(0.0, piece_s - left_s[put.wait]) + WAIT_S * put.windows))
                left_s[puts[-1].wait] = max(0.0, left_s[puts[-1].wait] - piece_s)
            yield tuple(puts)


def _fewest(puts: Sequence[Put]) -> tuple[str, ...]:
    """Return the waits of the fewest equal pieces with these shares."""
    numbers = Counter(put.name for put in puts)
    pieces = gcd(*numbers.values())
    return tuple(wait for wait, number in numbers.items() for _ in range(number // pieces))


@dataclass(frozen=True)
class Rooms:
    """Waits of one chunk.

    backward of layer l    bwd.mlp.0 │ linear_fc2 │ bwd.mlp.1 │ linear_fc1 │ bwd.mlp.2   bwd.attention.0 │ linear_proj │ ...
    linear_fc2 of l                               └──────────────── may run in these, then in bwd.mlp.0 of l - 1 ──>
    any linear of l        and in the next forward, in the collectives of the same layer

    `forwards`: whether a forward of this chunk follows its backwards.
    """

    plan: Plan
    entry: Stage
    job: Job
    prices: Prices
    forwards: bool

    def loads(self, layer: int) -> Loads:
        """Waits of its backward first."""
        lengths_s, filled_s = zip(*waits, strict=True) if (waits := self._by_layer.get(layer, {}).values()) else ((), ())
        return Loads(lengths_s, filled_s, self.prices.profile.interference)

    def deferrable(self, layer: int) -> Iterator[tuple[Section, str]]:
        """Linears whose weight gradients may be delayed, in backward order."""
        for section in reversed(self.plan.model.sections_of(layer)):
            if not (section.captured or section.apart or (section.exchanges and self.job.model.experts_whole)):
                yield from ((section, name) for name in reversed(section.linears))

    @once
    def linears(self, layer: int) -> tuple[Linear, ...]:
        return tuple(self._linear(layer, section, name) for section, name in self.deferrable(layer))

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
        hidden, puts = None, list[Put]()
        for place, at in enumerate(waits):
            if (at.passing, at.half, at.ordinal) == ("bwd", section.half, hides):
                hidden = Put(place, window_name("bwd", at.half, at.ordinal), 0)
            if place >= first:
                windows = place - first if at.passing == "bwd" else 2 * len(waits)
                puts.append(Put(place, window_name(at.passing, at.half, at.ordinal), windows))
            elif at._replace(layer=layer - 1) in self._by_layer.get(layer - 1, ()):
                puts.append(Put(place, window_name("bwd", at.half, at.ordinal, -1), place + len(own) - first))
        cost = self.cost(name)
        cuts = ((pieces, cost.cut(pieces)[0].seconds) for pieces in (1, *PIECES) if pieces <= cost.most_pieces)
        return Linear(name, hidden, tuple(sorted(puts, key=lambda put: put.windows)), tuple(cuts))


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

    def fill(self, pieces: bool) -> None:
        """Choose the waits of each layer's weight gradients: first those without forwards, then those that gain most per byte."""
        rooms, candidates = self._rooms, list[tuple[float, int, LayerRange, Placed]]()
        for part in rooms.parts:
            linears = tuple(linear._replace(cuts=linear.cuts[: None if pieces else 1]) for linear in rooms.linears(part.first))
            ways = ways_of(rooms.loads(part.first), linears)
            candidates += [(_gain_per_byte(rooms, ways[0], way), -part.first, part, way) for way in ways]
        chosen_s: dict[int, float] = {}
        for *_, part, way in sorted(candidates, key=lambda candidate: candidate[:2], reverse=True):
            if way.seconds < chosen_s.get(part.first, inf) and self.holds(part, way.waits):
                chosen_s[part.first] = way.seconds

    def send_first(self) -> None:
        """Let weight gradients run once the gradient of the chunk's input is sent.

        held   ╲  backward k                     the lowest layers first: their operands wait shortest, where memory is freest
                ╲___ linear_fc1(2) ___ ... sent

        In each layer the last one of backward comes first. Operands of experts' linears grow with a rank's rows, also where
        halves fall back: they are not held.
        """
        rooms, entry = self._rooms, self._rooms.entry
        for part in rooms.parts if entry.stage or entry.chunk else ():
            delayed, sent = entry.rule_for(part.first).weight_gradients, dict[str, tuple[str, ...]]()
            for section, name in reversed([*rooms.deferrable(part.first)]):
                if name not in delayed and not section.of_name[name].of_experts:
                    more = {**sent, name: (SEND_BACKWARD,)}
                    sent = more if self.holds(part, more) else sent

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

    def filled(self, budgets: Sequence[int], *, forwards: bool = False, pieces: bool = False, sending: bool = False) -> Plan:
        """Return the plan with weight gradients in its waits; unchanged if nothing is gained or fits.

        `forwards`: whether waits of forwards are filled, too. `pieces`: whether weight gradients may be cut. `sending`: instead,
        they run once the gradient of their chunk's input is sent, and none waits for them.
        """
        entries = []
        for number, entry in enumerate(self.plan.stages):
            through = self._through(entry.stage, entry.chunk, sending)
            rooms = self._rooms(number, forwards and through[1] is not through[0])
            filling = Filling(rooms, self.simulation, through, budgets[entry.stage])
            filling.send_first() if sending else filling.fill(pieces)
            entries.append(filling.entry(receives=self.job.chunks == 1 and cooldown_backwards(self.job, entry.stage) > 0))
        return self.plan.model_copy(update={"stages": tuple(entries)})

    @once
    def _rooms(self, number: int, forwards: bool) -> Rooms:
        return Rooms(self.plan, self.plan.stages[number], self.job, self.prices, forwards)

    @once
    def _through(self, stage: int, chunk: int, drains: bool) -> tuple[Executed, Executed]:
        """Return a backward of a chunk, and the last pass in which its weight gradients may run: a forward of any chunk that
        follows it, or itself. `drains`: its first backward in cool-down, or else its last."""
        passes = [execution for execution in self.simulation.executed[stage] if execution.action.is_pass]
        backwards = [at for at, execution in enumerate(passes) if execution.action[1:] == ("B", chunk)]
        followed = [at for at in backwards if at + 1 < len(passes) and passes[at + 1].action.kind == "F"]
        if followed and not drains:
            at = followed[len(followed) // 2]
            return passes[at], passes[at + 1]
        cooldown = [at for at in backwards if passes[at].phase == "cooldown"] or backwards[-1:]
        alone = passes[(cooldown if drains else backwards)[0]]
        return alone, alone


def _gain_per_byte(rooms: Rooms, first: Placed, way: Placed) -> float:
    """Seconds gained over `first`, which has no forwards, by byte that waits for a forward; infinite without such bytes."""
    waiting = [linear for linear, waits in way.waits.items() if any(map(is_forward, waits))]
    return (first.seconds - way.seconds) / sum(rooms.cost(linear).bytes for linear in waiting) if waiting else inf
