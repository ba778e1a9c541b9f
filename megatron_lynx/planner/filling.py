"""Fills what waits a plan's replays leave with weight gradients: the second filler, which depends on no other rank.

    the plan, rehearsed ──> what is left of every wait     ──packing──> the best ways to fill each layer's waits
                        └─> what is left of the budget     ──slack────> the layers for which there is memory meanwhile
                                                               └──> the plan with both fillers

[1] in every layer first what waits for a window of the same backward only, which holds little; then, as far as memory goes, what
    waits for a forward, where a byte gains most first, and of equals in the lowest layer: its weight gradients wait shortest
[2] what waits for a forward may run in the receive of a gradient, too: in cool-down no forward comes
[3] with several chunks per stage the forward is whichever comes behind the backward; the receive is not offered, so in cool-down
    what waits is computed at the end. That may cost more than it gains, so such plans are tried without forwards as well
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_lynx.anatomy.address import RECV_BACKWARD, is_forward, window_at
from megatron_lynx.config.job import Job
from megatron_lynx.cost.in_hand import less_in_hand_bytes
from megatron_lynx.cost.prices import Prices
from megatron_lynx.cost.stage import phases_of
from megatron_lynx.plan.plan import LayerRange, Plan, Stage, WeightGradients
from megatron_lynx.plan.rule import joined
from megatron_lynx.planner.packing import NOWHERE, InTurns, Packed, Ways, ways_of
from megatron_lynx.planner.rooms import Rooms
from megatron_lynx.planner.slack import Slack, next_forward
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.units import MIB


class Filler:
    """Fills the waits of one plan for a job.

    Args:
        simulation: of the plan.
        known: from fillers of other plans for the job.
        forwards: the stages on which waits of forwards are filled, too.
    """

    def __init__(
        self, plan: Plan, job: Job, profile: Profile, simulation: Simulation, known: Known, *, forwards: Collection[int]
    ) -> None:
        self._plan = plan
        self._job = job
        self._simulation = simulation
        prices = Prices(profile, less_in_hand_bytes(job))
        rooms = (_rooms(plan, entry, job, prices, simulation, forwards=entry.stage in forwards) for entry in plan.stages)
        self._ways = [_WaysOfLayers(each, known) for each in rooms]

    def filled(self, budgets: Sequence[int]) -> Plan:
        """The plan with weight gradients in its waits; the same plan where there is nothing to gain, or no memory for it.

        `budgets`: what every stage's layers may hold, in bytes.
        """
        fillings = [self._filling(ways, budgets[ways.rooms.entry.stage]) for ways in self._ways]
        entries = tuple(filling.filled(receives=_receives(self._job, filling.rooms.entry)) for filling in fillings)
        return self._plan.model_copy(update={"stages": entries})

    def _filling(self, ways: _WaysOfLayers, budget_bytes: int) -> _Filling:
        entry = ways.rooms.entry
        first_layers = [each.layers.first for each in self._plan.chunks_of(entry.stage)]
        return _Filling(ways.rooms, Slack(self._simulation, entry, first_layers, budget_bytes), ways)


def _rooms(plan: Plan, entry: Stage, job: Job, prices: Prices, simulation: Simulation, *, forwards: bool) -> Rooms:
    followed = next_forward(simulation, entry.stage, entry.chunk) is not None
    return Rooms(plan, entry, prices, forwards=forwards and followed, looked_into=not job.model.experts_whole)


def _receives(job: Job, entry: Stage) -> bool:
    return job.chunks == 1 and phases_of(job, entry.stage).cooldown > 0


@dataclass(frozen=True)
class Known:
    """What fillers of other plans for one job have found."""

    ways: dict[object, Ways | InTurns] = field(default_factory=dict)
    """To fill layers, worked out once where waits are alike."""
    best: dict[object, list[Packed]] = field(default_factory=dict)


@dataclass(frozen=True)
class _WaysOfLayers:
    """The best ways to fill the waits of each layer of a chunk."""

    rooms: Rooms
    known: Known
    by_layer: dict[int, list[Packed]] = field(default_factory=dict)

    def of(self, layer: int) -> list[Packed]:
        """The first one waits for no forward."""
        if layer not in self.by_layer:
            self.by_layer[layer] = self._found(layer) if self.rooms.waits(layer) else [NOWHERE]
        return self.by_layer[layer]

    def _found(self, layer: int) -> list[Packed]:
        waits, linears = self.rooms.waits(layer), self.rooms.linears(layer)
        lengths_s, filled_s = (tuple(wait.seconds for wait in waits), tuple(wait.filled_s for wait in waits))
        key = lengths_s, linears
        if key not in self.known.ways:
            self.known.ways[key] = ways_of(lengths_s, linears, self.rooms.interference)
        if (key, filled_s) not in self.known.best:
            self.known.best[key, filled_s] = self.known.ways[key].best(filled_s)
        return self.known.best[key, filled_s]


@dataclass(frozen=True)
class _Filling:
    """One chunk of one stage on its way."""

    rooms: Rooms
    slack: Slack
    ways: _WaysOfLayers
    chosen: dict[int, Packed] = field(default_factory=dict)

    def filled(self, *, receives: bool) -> Stage:  # [1]
        layers = {layer: self.ways.of(layer) for layer in self.rooms.entry.layers}
        for layer, found in layers.items():
            if not self._choose(layer, found[0]):
                any(self._choose(layer, some) for some in self._parts(layer, found[0]))
        gains = [
            ((found[0].seconds - other.seconds) / self._in_forwards_bytes(other), -layer, other)
            for layer, found in layers.items()
            for other in found[1:]
        ]
        for _, layer, other in sorted(gains, key=lambda each: each[:2], reverse=True):
            if -layer in self.chosen and other.seconds < self.chosen[-layer].seconds:
                self._choose(-layer, other)
        return self._entry(receives)

    def _choose(self, layer: int, packed: Packed) -> bool:
        """Takes this way in place of the one before, if there is memory for it."""
        before = self.chosen.get(layer)
        if before is not None:
            self._give_back(layer, before, len(before.waits))
        for number, (linear, wait) in enumerate(packed.waits.items()):
            if not self.slack.takes(*self._held(layer, linear, wait)):
                self._give_back(layer, packed, number)
                break
        else:
            self.chosen[layer] = packed
            return True
        for linear, wait in [] if before is None else before.waits.items():
            self.slack.takes(*self._held(layer, linear, wait))
        return False

    def _give_back(self, layer: int, packed: Packed, count: int) -> None:
        for linear, wait in list(packed.waits.items())[:count]:
            self.slack.gives_back(*self._held(layer, linear, wait))

    def _held(self, layer: int, linear: str, wait: str) -> tuple[int, float, float]:
        """Bytes, and from when until when they are held."""
        begins_s = self.slack.begins_s((layer, self.rooms.half_of(linear)))
        return self.rooms.cost(linear).bytes, begins_s, self.slack.opens_s(window_at(wait, layer))

    def _parts(self, layer: int, packed: Packed) -> Iterator[Packed]:
        """One weight gradient of several alone, where each gains something by itself: not where one that hides a wait makes room
        for others."""
        hiding = {linear.name for linear in self.rooms.linears(layer) if linear.beside is not None}
        if len(packed.waits) > 1 and not packed.waits.keys() & hiding:
            yield from (Packed(packed.seconds, {linear: wait}) for linear, wait in packed.waits.items())

    def _in_forwards_bytes(self, packed: Packed) -> int:
        return sum(self.rooms.cost(linear).bytes for linear, wait in packed.waits.items() if is_forward(wait)) or 1

    def _entry(self, receives: bool) -> Stage:
        entry, rules = self.rooms.entry, []
        for rule in entry.rules:
            for layers in rule.parts:
                waits = self._waits_of(layers)
                deferred = {linear: _waits(wait, receives) for linear, wait in waits.items()}
                rules.append(rule.model_copy(update={"layers": layers, "weight_gradients": deferred}))
        linears = {linear for rule in rules for linear in rule.weight_gradients}
        if not linears:
            return entry
        size_bytes = self.slack.most_taken_bytes + max(self.rooms.cost(linear).bytes for linear in linears)
        bound = WeightGradients(bytes=-(-size_bytes // MIB) * MIB)
        return entry.model_copy(update={"rules": joined(rules), "weight_gradients": bound})

    def _waits_of(self, layers: LayerRange) -> dict[str, str]:
        """What layers of one rule put off: several only what each of them does, to the same wait."""
        chosen = [self.chosen[layer].waits if layer in self.chosen else {} for layer in layers]
        return {linear: wait for linear, wait in chosen[0].items() if all(own.get(linear) == wait for own in chosen)}


def _waits(wait: str, receives: bool) -> tuple[str, ...]:  # [2]
    return (wait, RECV_BACKWARD) if receives and is_forward(wait) else (wait,)
