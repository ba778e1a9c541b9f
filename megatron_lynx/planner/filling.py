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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

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
from megatron_lynx.cost.section import Prices, WeightGradient
from megatron_lynx.cost.stage import cooldown_backwards
from megatron_lynx.once import once
from megatron_lynx.plan.plan import Plan, Stage, WeightGradients
from megatron_lynx.plan.rule import joined
from megatron_lynx.plan.timetables import layout_of, planned_halves
from megatron_lynx.planner.packing import Linear, Placed, Put, Wait, ways_of
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
    any linear of l        and in the next forward, in the collectives of the same layer

    `forwards`: whether a forward of this chunk follows its backwards. `looked_into`: whether plans may change the inside of
    experts.
    """

    plan: Plan
    entry: Stage
    prices: Prices
    forwards: bool
    looked_into: bool = True

    def waits(self, layer: int) -> tuple[Wait, ...]:
        """Those of its backward first."""
        return tuple(self._by_layer.get(layer, {}).values())

    @once
    def linears(self, layer: int) -> tuple[Linear, ...]:
        """In backward order."""
        sections = reversed(self.plan.model.sections_of(layer))
        return tuple(self._linear(layer, section, name) for section in sections for name in reversed(self._deferrable(section)))

    @once
    def cost(self, linear: str) -> WeightGradient:
        return self.prices.weight_gradient(self._section_of[linear], linear)

    def half_of(self, linear: str) -> Half:
        return self._section_of[linear].half

    def _deferrable(self, section: Section) -> tuple[str, ...]:
        closed = section.captured or section.apart or (section.exchanges and not self.looked_into)
        return () if closed else section.linears

    @cached_property
    def _by_layer(self) -> dict[int, dict[WindowAddress, Wait]]:
        """Waits of each layer, without exchanges that take no time."""
        timetable = Timetable([tuple(planned_halves(self.entry, self.plan.model.sections_of))], layout_of(self.plan))
        halves = {half.planned.key: half for half in treated_halves(self.entry, timetable.chunks[0], self.prices)}
        passes = [timetable.backward(0), *([timetable.forward(0)] if self.forwards else [])]
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
        waits, sliced = list(self._by_layer.get(layer, ())), self.prices.profile.shape.sequence_parallel
        waits_of_half = [at for at, wait in enumerate(waits) if wait.passing == "bwd" and wait.half == section.half]
        hides = section.beside_wgrad(name, sliced)
        beside = next((at for at in waits_of_half if waits[at].ordinal == hides), None)
        puts = tuple(self._puts(layer, waits, self._first(waits, section, name)))
        return Linear(name, self.cost(name).bytes, beside, puts, self._cuts(name))

    @once
    def _cuts(self, linear: str) -> tuple[tuple[float, ...], ...]:
        cost = self.cost(linear)
        numbers = [1, *(pieces for pieces in PIECES if pieces <= cost.most_pieces)]
        return tuple(tuple(piece.seconds for piece in cost.cut(pieces)) for pieces in numbers)

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
        backward, below = sum(wait.passing == "bwd" for wait in waits), self._by_layer.get(layer - 1, ())
        for at, wait in enumerate(waits):
            if wait.passing == "fwd":
                yield Put(at, window_name("fwd", wait.half, wait.ordinal), 2 * len(waits))  # longer than in any backward
            elif at >= first:
                yield Put(at, window_name("bwd", wait.half, wait.ordinal), at - first)
            elif wait._replace(layer=layer - 1) in below:
                yield Put(at, window_name("bwd", wait.half, wait.ordinal, -1), at + backward - first)

    @cached_property
    def _section_of(self) -> dict[str, Section]:
        """By linear."""
        sections = dict.fromkeys(section for layer in self.entry.layers for section in self.plan.model.sections_of(layer))
        return {linear: section for section in sections for linear in section.linears}


class Claim(NamedTuple):
    """Bytes of one weight gradient's operands, and the times between which they are held."""

    bytes: int
    from_s: float
    until_s: float


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

    def takes(self, claims: Sequence[Claim]) -> bool:
        """Take the bytes of all claims if they fit together; return whether they do."""
        for number, (size_bytes, from_s, until_s) in enumerate(claims):
            if self._left[self._between(from_s, until_s)].min(initial=size_bytes) < size_bytes:
                self.gives_back(claims[:number])
                return False
            self._take(size_bytes, from_s, until_s)
        return True

    def gives_back(self, claims: Sequence[Claim]) -> None:
        for size_bytes, from_s, until_s in claims:
            self._take(-size_bytes, from_s, until_s)

    @property
    def most_taken_bytes(self) -> int:
        return int(self._taken.max(initial=0))

    def _take(self, size_bytes: int, from_s: float, until_s: float) -> None:
        chosen = self._between(from_s, until_s)
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


Waits = Mapping[str, tuple[str, ...]]
"""By deferred linear, the wait of each piece."""


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
            rooms, slack = self._rooms(number, forwards), self._slack(entry, budgets)
            receives = self.job.chunks == 1 and cooldown_backwards(self.job, entry.stage) > 0
            entries.append(_deferring(rooms, slack, self._best(rooms, slack, pieces), receives=receives))
        return self.plan.model_copy(update={"stages": tuple(entries)})

    def sending_first(self, budgets: Sequence[int]) -> Plan:
        """Return the plan with weight gradients that run once the gradient of their chunk's input is sent: none waits for them.

        held   ╲  backward k                     the lowest layers first: their operands wait shortest, where memory is freest
                ╲___ linear_fc1(2) ___ ... sent
        """
        entries = []
        for number, entry in enumerate(self.plan.stages):
            if entry.stage or entry.chunk:
                rooms, slack = self._rooms(number, False), self._slack(entry, budgets, drains=True)
                entry = _deferring(rooms, slack, _sent_first(rooms, slack))
            entries.append(entry)
        return self.plan.model_copy(update={"stages": tuple(entries)})

    @once
    def _rooms(self, number: int, forwards: bool) -> Rooms:
        entry = self.plan.stages[number]
        followed = forwards and next_forward(self.simulation, entry.stage, entry.chunk) is not None
        return Rooms(self.plan, entry, self.prices, followed, not self.job.model.experts_whole)

    def _slack(self, entry: Stage, budgets: Sequence[int], *, drains: bool = False) -> Slack:
        first_layers = [chunk.layers.first for chunk in self.plan.chunks_of(entry.stage)]
        return Slack(self.simulation, entry, first_layers, budgets[entry.stage], drains=drains)

    def _best(self, rooms: Rooms, slack: Slack, pieces: bool) -> dict[int, Waits]:
        """Return the waits of each layer's weight gradients: first those without forwards, then what gains most per byte."""
        packed = partial(ways_of, interference=self.prices.profile.interference, pieces=pieces)
        ways = {layer: packed(rooms.waits(layer), rooms.linears(layer)) for layer in rooms.entry.layers}
        chosen: dict[int, Placed] = {}

        def choose(layer: int, placed: Placed) -> bool:
            """Replace the layer's way by this one, if there is memory."""
            before = _claims(rooms, slack, layer, chosen[layer].waits) if layer in chosen else []
            slack.gives_back(before)
            if not slack.takes(_claims(rooms, slack, layer, placed.waits)):
                slack.takes(before)
                return False
            chosen[layer] = placed
            return True

        for layer, (first, *_) in ways.items():
            if not choose(layer, first):
                any(choose(layer, part) for part in _parts(rooms.linears(layer), first))
        gains = [
            ((first.seconds - other.seconds) / _in_forwards_bytes(rooms, other), -layer, other)
            for layer, (first, *others) in ways.items()
            for other in others
        ]
        for _, layer, other in sorted(gains, key=lambda gain: gain[:2], reverse=True):
            if -layer in chosen and other.seconds < chosen[-layer].seconds:
                choose(-layer, other)
        return {layer: placed.waits for layer, placed in chosen.items()}


def _claims(rooms: Rooms, slack: Slack, layer: int, waits: Waits) -> list[Claim]:
    return [
        Claim(
            rooms.cost(linear).bytes,
            slack.begins_s((layer, rooms.half_of(linear))),
            max(slack.opens_s(window_at(wait, layer)) for wait in each),
        )
        for linear, each in waits.items()
    ]


def _parts(linears: Sequence[Linear], placed: Placed) -> Iterator[Placed]:
    """Yield ways with only one of the weight gradients, if each gains something alone: not if one of them hides a wait."""
    hiding = {linear.name for linear in linears if linear.beside is not None}
    if len(placed.waits) > 1 and not placed.waits.keys() & hiding:
        yield from (Placed(placed.seconds, {linear: waits}) for linear, waits in placed.waits.items())


def _in_forwards_bytes(rooms: Rooms, placed: Placed) -> int:
    return sum(rooms.cost(linear).bytes for linear, waits in placed.waits.items() if any(map(is_forward, waits))) or 1


def _sent_first(rooms: Rooms, slack: Slack) -> dict[int, Waits]:
    """Return the linears of each rule's layers whose operands fit in all of them, the last one of backward first.

    Operands of experts' linears grow with a rank's rows, also where halves fall back: they are not held.
    """
    sent: dict[int, Waits] = {layer: {} for layer in rooms.entry.layers}
    for layers in sorted((part for rule in rooms.entry.rules for part in rule.parts), key=lambda part: part.first):
        delayed = rooms.entry.rule_for(layers.first).weight_gradients
        sections = rooms.plan.model.sections_of(layers.first)
        of_experts = {item.name for half in sections for item in half.items if item.of_experts}
        for linear in reversed(rooms.linears(layers.first)):
            if linear.name in delayed or linear.name in of_experts:
                continue
            begins_s = (slack.begins_s((layer, rooms.half_of(linear.name))) for layer in layers)
            if slack.takes([Claim(linear.bytes, begin_s, slack.sent_s) for begin_s in begins_s]):
                sent |= {layer: {**sent[layer], linear.name: (SEND_BACKWARD,)} for layer in layers}
    return sent


def _deferring(rooms: Rooms, slack: Slack, chosen: Mapping[int, Waits], *, receives: bool = False) -> Stage:
    """Return the entry with weight gradients that all layers of a rule defer to the same waits, besides those before, and a bound
    of their bytes. `receives`: whether those that wait for a forward also run in receives."""
    entry, rules, linears = rooms.entry, [], set[str]()
    for rule in entry.rules:
        for layers in rule.parts:
            first, *others = (chosen.get(layer, {}) for layer in layers)
            waits = {linear: each for linear, each in first.items() if all(other.get(linear) == each for other in others)}
            deferred = {linear: _waits(each, receives) for linear, each in waits.items()}
            pieces = {linear: len(each) for linear, each in waits.items() if len(each) > 1}
            changes = {
                "layers": layers,
                "weight_gradients": rule.weight_gradients | deferred,
                "weight_gradient_pieces": rule.weight_gradient_pieces | pieces,
            }
            rules.append(rule.model_copy(update=changes))
            linears |= waits.keys()
    if not linears:
        return entry
    before = 0 if entry.weight_gradients is None else entry.weight_gradients.bytes
    size_bytes = before + slack.most_taken_bytes + max(rooms.cost(linear).bytes for linear in linears)
    bound = WeightGradients(bytes=-(-size_bytes // MIB) * MIB)
    return entry.model_copy(update={"rules": joined(rules), "weight_gradients": bound})


def _waits(waits: tuple[str, ...], receives: bool) -> tuple[str, ...]:
    return (*waits, *[RECV_BACKWARD] * (sum(map(is_forward, waits)) if receives else 0))
