"""Fills waits that recomputation leaves with weight gradients, which depend on no other rank.

    the plan, rehearsed ──> time left in each wait      ──packing──> the best ways to fill each layer's waits
                        └─> memory left in the budget   ──slack────> the layers for which there is memory
                                                               └──> the plan with weight gradients in waits

Each layer first gets weight gradients that wait for a window of the same backward, which hold little; then, while memory lasts,
those that wait for a forward: the largest gain per byte first, of equals the lowest layer, whose weight gradients wait shortest.
Those may also run in the receive of a gradient, because cool-down has no forwards.

With several chunks, the forward is the next one of any chunk, and receives are not used, so in cool-down they run at the end.
That may cost more than it gains, so plans without forwards are tried as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from megatron_lynx.anatomy import HALVES, Half, Section
from megatron_lynx.anatomy.address import (
    RECV_BACKWARD,
    SEND_BACKWARD,
    FrameKey,
    Window,
    WindowAddress,
    is_forward,
    window_at,
    window_name,
)
from megatron_lynx.config.job import Job
from megatron_lynx.cost.moments import less_in_hand_bytes
from megatron_lynx.cost.section import Prices, WeightGradient
from megatron_lynx.cost.stage import cooldown_backwards
from megatron_lynx.once import once
from megatron_lynx.plan.facts import LayerRange
from megatron_lynx.plan.plan import Plan, Stage, WeightGradients
from megatron_lynx.plan.rule import Rule, joined
from megatron_lynx.plan.timetables import layout_of, planned_halves
from megatron_lynx.planner.packing import LONG, Linear, Placed, Put, Wait, ways_of
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import treated_halves
from megatron_lynx.simulator.simulation import Executed, Simulation
from megatron_lynx.timetable import Timetable
from megatron_lynx.units import MIB

PIECES = (2, 4)
"""Numbers of pieces that are tried. Four fill every wait; more are GEMMs of less efficiency."""


@dataclass(frozen=True)
class Rooms:
    """Waits of one chunk.

    backward of layer l    bwd.mlp.0 │ linear_fc2 │ bwd.mlp.1 │ linear_fc1 │ bwd.mlp.2   bwd.attention.0 │ linear_proj │ ...
    linear_fc2 of l                               └──────────────── may run in these, then in bwd.mlp.0 of l - 1 ──>
    any linear of l        and in the next forward, in the collectives of its own layer

    `forwards`: whether a forward of this chunk follows its backwards. `looked_into`: whether plans may change the inside of
    experts. `pieces`: whether weight gradients may be cut.
    """

    plan: Plan
    entry: Stage
    prices: Prices
    forwards: bool
    looked_into: bool = True
    pieces: bool = False

    def waits(self, layer: int) -> tuple[Wait, ...]:
        """Those of its backward first."""
        return tuple(self._by_layer.get(layer, {}).values())

    def linears(self, layer: int) -> tuple[Linear, ...]:
        """In backward order."""
        return self._linears[layer]

    @once
    def cost(self, linear: str) -> WeightGradient:
        return self.prices.weight_gradient(self._section_of[linear], linear)

    def half_of(self, linear: str) -> Half:
        return self._section_of[linear].half

    def _deferrable(self, section: Section) -> tuple[str, ...]:
        closed = section.captured or section.apart or (section.exchanges and not self.looked_into)
        return () if closed else section.linears

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
        """Without the layer's number."""
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


class Filler:
    """Fills the waits of one plan.

    Args:
        known: by waits and linears of a layer, the best ways to fill it; shared with fillers of other plans.
        forwards: stages on which waits of forwards are filled, too.
        pieces: whether weight gradients may be cut.
    """

    def __init__(
        self,
        plan: Plan,
        job: Job,
        profile: Profile,
        simulation: Simulation,
        known: Known,
        *,
        forwards: Collection[int],
        pieces: bool = False,
    ) -> None:
        self._plan = plan
        self._job = job
        self._simulation = simulation
        prices = Prices(profile, less_in_hand_bytes(job))
        self._known = known
        self._rooms = [
            Rooms(plan, entry, prices, self._followed(entry, forwards), not job.model.experts_whole, pieces)
            for entry in plan.stages
        ]

    def _followed(self, entry: Stage, forwards: Collection[int]) -> bool:
        return entry.stage in forwards and next_forward(self._simulation, entry.stage, entry.chunk) is not None

    def filled(self, budgets: Sequence[int]) -> Plan:
        """Return the plan with weight gradients in its waits; unchanged if nothing is gained or fits.

        `budgets`: bytes of each stage's layers.
        """
        fillings = [self._filling(rooms, budgets[rooms.entry.stage]) for rooms in self._rooms]
        entries = tuple(
            filling.filled(receives=self._job.chunks == 1 and cooldown_backwards(self._job, filling.rooms.entry.stage) > 0)
            for filling in fillings
        )
        return self._plan.model_copy(update={"stages": entries})

    def _filling(self, rooms: Rooms, budget_bytes: int) -> _Filling:
        first_layers = [chunk.layers.first for chunk in self._plan.chunks_of(rooms.entry.stage)]
        slack = Slack(self._simulation, rooms.entry, first_layers, budget_bytes)
        return _Filling(rooms, slack, {layer: self._ways(rooms, layer) for layer in rooms.entry.layers})

    def _ways(self, rooms: Rooms, layer: int) -> list[Placed]:
        key = rooms.waits(layer), rooms.linears(layer)
        if key not in self._known:
            self._known[key] = ways_of(*key, rooms.prices.profile.interference)
        return self._known[key]


Known = dict[tuple[tuple[Wait, ...], tuple[Linear, ...]], list[Placed]]


@dataclass(frozen=True)
class _Filling:
    rooms: Rooms
    slack: Slack
    ways: Mapping[int, list[Placed]]
    """Placings of each layer; the first uses no forward."""
    chosen: dict[int, Placed] = field(default_factory=dict)

    def filled(self, *, receives: bool) -> Stage:
        for layer, ways in self.ways.items():
            if not self._choose(layer, ways[0]):
                any(self._choose(layer, some) for some in self._parts(layer, ways[0]))
        gains = [
            ((ways[0].seconds - other.seconds) / self._in_forwards_bytes(other), -layer, other)
            for layer, ways in self.ways.items()
            for other in ways[1:]
        ]
        for _, layer, other in sorted(gains, key=lambda gain: gain[:2], reverse=True):
            if -layer in self.chosen and other.seconds < self.chosen[-layer].seconds:
                self._choose(-layer, other)
        return self._entry(receives)

    def _choose(self, layer: int, placed: Placed) -> bool:
        """Replace the layer's way by this one, if there is memory."""
        before = self.chosen.get(layer)
        if before is not None:
            self._give_back(layer, before, len(before.waits))
        for number, (linear, waits) in enumerate(placed.waits.items()):
            if not self.slack.takes(*self._held(layer, linear, waits)):
                self._give_back(layer, placed, number)
                break
        else:
            self.chosen[layer] = placed
            return True
        for linear, waits in [] if before is None else before.waits.items():
            self.slack.takes(*self._held(layer, linear, waits))
        return False

    def _give_back(self, layer: int, placed: Placed, count: int) -> None:
        for linear, waits in list(placed.waits.items())[:count]:
            self.slack.gives_back(*self._held(layer, linear, waits))

    def _held(self, layer: int, linear: str, waits: Sequence[str]) -> tuple[int, float, float]:
        """Bytes, and the times between which they are held."""
        begins_s = self.slack.begins_s((layer, self.rooms.half_of(linear)))
        return self.rooms.cost(linear).bytes, begins_s, max(self.slack.opens_s(window_at(wait, layer)) for wait in waits)

    def _parts(self, layer: int, placed: Placed) -> Iterator[Placed]:
        """Yield ways with only one of the weight gradients, if each gains something alone: not if one of them hides a wait."""
        hiding = {linear.name for linear in self.rooms.linears(layer) if linear.beside is not None}
        if len(placed.waits) > 1 and not placed.waits.keys() & hiding:
            yield from (Placed(placed.seconds, {linear: waits}) for linear, waits in placed.waits.items())

    def _in_forwards_bytes(self, placed: Placed) -> int:
        return sum(self.rooms.cost(linear).bytes for linear, waits in placed.waits.items() if any(map(is_forward, waits))) or 1

    def _entry(self, receives: bool) -> Stage:
        entry, rules = self.rooms.entry, []
        for rule in entry.rules:
            for layers in rule.parts:
                waits = self._waits_of(layers)
                pieces = {linear: len(each) for linear, each in waits.items() if len(each) > 1}
                deferred = {linear: _waits(each, receives) for linear, each in waits.items()}
                changes = {"layers": layers, "weight_gradients": deferred, "weight_gradient_pieces": pieces}
                rules.append(rule.model_copy(update=changes))
        linears = {linear for rule in rules for linear in rule.weight_gradients}
        if not linears:
            return entry
        return _deferring(entry, rules, linears, self.rooms, self.slack)

    def _waits_of(self, layers: LayerRange) -> dict[str, tuple[str, ...]]:
        """Weight gradients deferred by all layers of a rule, to the same waits."""
        chosen = [self.chosen[layer].waits if layer in self.chosen else {} for layer in layers]
        return {linear: waits for linear, waits in chosen[0].items() if all(other.get(linear) == waits for other in chosen)}


def _waits(waits: tuple[str, ...], receives: bool) -> tuple[str, ...]:
    return (*waits, *[RECV_BACKWARD] * (sum(map(is_forward, waits)) if receives else 0))


def _deferring(entry: Stage, rules: list[Rule], linears: Collection[str], rooms: Rooms, slack: Slack) -> Stage:
    """Return the entry with these rules, and a bound of what its weight gradients hold: `linears` besides those before."""
    before = 0 if entry.weight_gradients is None else entry.weight_gradients.bytes
    size_bytes = before + slack.most_taken_bytes + max(rooms.cost(linear).bytes for linear in linears)
    bound = WeightGradients(bytes=-(-size_bytes // MIB) * MIB)
    return entry.model_copy(update={"rules": joined(rules), "weight_gradients": bound})


@dataclass(frozen=True)
class SendingFirst:
    """Chooses weight gradients that run once the gradient of their chunk's input is sent, for which no other stage waits.

    held   ╲  backward k                     the lowest layers first: their operands wait shortest, where memory is freest
            ╲___ linear_fc1(2) ___ ... sent

    hiding: whether linears are delayed whose weight gradients hide waits of their half; the rehearsal decides.
    """

    plan: Plan
    job: Job
    profile: Profile
    simulation: Simulation
    hiding: bool

    def filled(self, budgets: Sequence[int]) -> Plan:
        """Return the plan with as many as fit. `budgets`: bytes of each stage's layers."""
        prices = Prices(self.profile, less_in_hand_bytes(self.job))
        entries = tuple(
            entry if entry.stage == entry.chunk == 0 else self._entry(entry, prices, budgets[entry.stage])
            for entry in self.plan.stages
        )
        return self.plan.model_copy(update={"stages": entries})

    def _entry(self, entry: Stage, prices: Prices, budget_bytes: int) -> Stage:
        first_layers = [chunk.layers.first for chunk in self.plan.chunks_of(entry.stage)]
        slack = Slack(self.simulation, entry, first_layers, budget_bytes, drains=True)
        rooms = Rooms(self.plan, entry, prices, forwards=False, looked_into=not self.job.model.experts_whole)
        parts = sorted((part for rule in entry.rules for part in rule.parts), key=lambda part: part.first)
        sent = {part.first: dict.fromkeys(self._of(part, entry, rooms, slack), (SEND_BACKWARD,)) for part in parts}
        linears = {linear for names in sent.values() for linear in names}
        if not linears:
            return entry
        rules = [
            rule.model_copy(update={"layers": part, "weight_gradients": rule.weight_gradients | sent[part.first]})
            for rule in entry.rules
            for part in rule.parts
        ]
        return _deferring(entry, rules, linears, rooms, slack)

    def _of(self, layers: LayerRange, entry: Stage, rooms: Rooms, slack: Slack) -> Iterator[str]:
        """Yield linears of a rule's layers whose operands fit in all of them, the last one of backward first.

        Operands of experts' linears grow with a rank's rows, also where halves fall back: they are not held.
        """
        delayed = entry.rule_for(layers.first).weight_gradients
        of_experts = {item.name for half in self.plan.model.sections_of(layers.first) for item in half.items if item.of_experts}
        for linear in reversed(rooms.linears(layers.first)):
            if linear.name in delayed or linear.name in of_experts or (linear.beside is not None and not self.hiding):
                continue
            begins_s = [slack.begins_s((layer, rooms.half_of(linear.name))) for layer in layers]
            took = [begin_s for begin_s in begins_s if slack.takes(linear.bytes, begin_s, slack.sent_s)]
            if len(took) == len(begins_s):
                yield linear.name
                continue
            for begin_s in took:
                slack.gives_back(linear.bytes, begin_s, slack.sent_s)
