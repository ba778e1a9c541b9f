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
        waits: dict[int, dict[WindowAddress, Wait]] = {}
        for through in (timetable.backward(0), *([timetable.forward(0)] if self.forwards else [])):
            for at in (wait.window for half in through.halves for wait in half.waits if not wait.over):
                assert isinstance(at, WindowAddress)
                section = halves[at.frame].section
                seconds = self.prices.windows_s(at.passing, section, section.linears)[at.ordinal]
                if seconds or not section.exchanges:
                    recomputed = (halves[task.half].part(task) for task in through.at("in", at) if task.do == "recompute")
                    name, filled_s = window_name(at.passing, at.half, at.ordinal), sum(part.seconds for part in recomputed)
                    waits.setdefault(at.layer, {})[at] = Wait(name, seconds, filled_s)
        return waits

    def _linear(self, layer: int, section: Section, name: str) -> Linear:
        """Its places: waits of its layer's backward after it, then those before it in the layer below, then those of the next
        forward, for which it waits longer than for any other."""
        sliced, waits = self.prices.profile.shape.sequence_parallel, list(self._by_layer.get(layer, ()))
        own = [at for at in waits if at.passing == "bwd"]
        hides = section.beside_wgrad(name, sliced)
        beside = next((place for place, at in enumerate(own) if (at.half, at.ordinal) == (section.half, hides)), None)
        behind = HALVES.index(section.half), -section.behind_wgrad(name, sliced) - (hides is not None)
        first = sum((HALVES.index(at.half), -at.ordinal) > behind for at in own)
        below = self._by_layer.get(layer - 1, ())
        names = [window_name(at.passing, at.half, at.ordinal) for at in waits]
        puts = [Put(place, names[place], place - first) for place in range(first, len(own))]
        for place, at in enumerate(own[:first]):
            if at._replace(layer=layer - 1) in below:
                puts.append(Put(place, window_name("bwd", at.half, at.ordinal, -1), place + len(own) - first))
        puts += [Put(place, names[place], 2 * len(waits)) for place in range(len(own), len(waits))]
        return Linear(name, beside, tuple(puts), self._cuts(name))

    @once
    def _cuts(self, linear: str) -> tuple[tuple[float, ...], ...]:
        cost = self.cost(linear)
        numbers = [1, *(pieces for pieces in PIECES if pieces <= cost.most_pieces)]
        return tuple(tuple(piece.seconds for piece in cost.cut(pieces)) for pieces in numbers)

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

    def __init__(self, plan: Plan, entry: Stage, simulation: Simulation, budget_bytes: int, *, drains: bool = False) -> None:
        """`budget_bytes`: of the stage's layers. `drains`: of the chunk's first backward in cool-down, or else its last."""
        backward, behind = _waiting_behind(simulation, entry, drains=drains)
        curve = simulation.memory(entry.stage)
        first, end = bisect_right(curve.times_s, backward.start_s) - 1, bisect_right(curve.times_s, behind.end_s)
        self.followed, self._end_s = behind is not backward, behind.end_s
        self._times_s = list(curve.times_s[first:end])
        self._free = budget_bytes - np.array(curve.bytes[first:end], dtype=np.int64)
        self._left = self._free.copy()
        self._moved = plan.chunks_of(entry.stage)[behind.action.chunk].layers.first - entry.layers.first
        self._spans: dict[object, tuple[float, float]] = {}
        for execution in (backward, behind):
            for span in execution.content.spans:
                what = span.name if span.kind == "window" else (span.kind, span.layer, span.half)
                self._spans[what] = execution.start_s + span.start_s, execution.start_s + span.end_s

    def begins_s(self, half: FrameKey) -> float:
        return self._spans[("backward", *half)][0]

    def opens_s(self, window: Window) -> float:
        """Time at which a wait is reached; the end of its half if it takes no time."""
        if not isinstance(window, WindowAddress):
            return self._end_s
        if window.passing == "fwd":  # may be another chunk's
            window = window._replace(layer=window.layer + self._moved)
        _, half_end_s = self._spans.get((PASS_NAMES[window.passing], *window.frame), (0.0, self._end_s))
        return self._spans.get(str(window), (half_end_s,))[0]

    def takes(self, claims: Sequence[Claim]) -> bool:
        """Take the bytes of all claims if they fit together; return whether they do."""
        self._take(claims)
        if all(self._left[self._between(claim)].min(initial=0) >= 0 for claim in claims):
            return True
        self.gives_back(claims)
        return False

    def gives_back(self, claims: Sequence[Claim]) -> None:
        self._take([claim._replace(bytes=-claim.bytes) for claim in claims])

    @property
    def most_taken_bytes(self) -> int:
        return int((self._free - self._left).max(initial=0))

    def _take(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._left[self._between(claim)] -= claim.bytes

    def _between(self, claim: Claim) -> slice:
        return slice(max(0, bisect_right(self._times_s, claim.from_s) - 1), bisect_right(self._times_s, claim.until_s))


def _waiting_behind(simulation: Simulation, entry: Stage, *, drains: bool) -> tuple[Executed, Executed]:
    """Return a backward of a chunk, and the last pass in which its weight gradients may run: a forward of any chunk that follows
    it, or itself."""
    passes = [execution for execution in simulation.executed[entry.stage] if execution.action.is_pass]
    backwards = [at for at, execution in enumerate(passes) if execution.action[1:] == ("B", entry.chunk)]
    followed = [at for at in backwards if at + 1 < len(passes) and passes[at + 1].action.kind == "F"]
    if followed and not drains:
        at = followed[len(followed) // 2]
        return passes[at], passes[at + 1]
    cooldown = [at for at in backwards if passes[at].phase == "cooldown"] or backwards[-1:]
    alone = passes[(cooldown if drains else backwards)[0]]
    return alone, alone


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
            slack = Slack(self.plan, entry, self.simulation, budgets[entry.stage])
            rooms = self._rooms(number, forwards and slack.followed)
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
                rooms, slack = (
                    self._rooms(number, False),
                    Slack(self.plan, entry, self.simulation, budgets[entry.stage], drains=True),
                )
                entry = _deferring(rooms, slack, _sent_first(rooms, slack))
            entries.append(entry)
        return self.plan.model_copy(update={"stages": tuple(entries)})

    @once
    def _rooms(self, number: int, forwards: bool) -> Rooms:
        return Rooms(self.plan, self.plan.stages[number], self.prices, forwards, not self.job.model.experts_whole)

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
            any(choose(layer, way) for way in (first, *_parts(rooms.linears(layer), first)))
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
        sections = rooms.plan.model.sections_of(layers.first)
        of_experts = {item.name for half in sections for item in half.items if item.of_experts}
        for name in (linear.name for linear in reversed(rooms.linears(layers.first))):
            first: Waits = {name: (SEND_BACKWARD,)}
            if name in rooms.entry.rule_for(layers.first).weight_gradients or name in of_experts:
                continue
            if slack.takes([claim for layer in layers for claim in _claims(rooms, slack, layer, first)]):
                sent |= {layer: {**sent[layer], **first} for layer in layers}
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
