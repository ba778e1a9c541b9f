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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_lynx.anatomy.address import RECV_BACKWARD, SEND_BACKWARD, is_forward, window_at
from megatron_lynx.config.job import Job
from megatron_lynx.cost.in_hand import less_in_hand_bytes
from megatron_lynx.cost.section import Prices
from megatron_lynx.cost.stage import phases_of
from megatron_lynx.plan.facts import LayerRange
from megatron_lynx.plan.plan import Plan, Stage, WeightGradients
from megatron_lynx.plan.rule import Rule, joined
from megatron_lynx.planner.packing import Linear, Placed, Wait, ways_of
from megatron_lynx.planner.rooms import Rooms, Slack, next_forward
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.units import MIB


class Filler:
    """Fills the waits of one plan for a job.

    Args:
        simulation: of the plan.
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
        entries = tuple(filling.filled(receives=_receives(self._job, filling.rooms.entry)) for filling in fillings)
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


def _receives(job: Job, entry: Stage) -> bool:
    return job.chunks == 1 and phases_of(job, entry.stage).cooldown > 0


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

    simulation: of the plan.
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
        chosen = {part.first: tuple(self._of(part, entry, rooms, slack)) for part in parts}
        linears = {linear for names in chosen.values() for linear in names}
        if not linears:
            return entry
        rules = [
            rule.model_copy(update={"layers": part, "weight_gradients": rule.weight_gradients | _sent(chosen[part.first])})
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


def _sent(linears: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(linears, (SEND_BACKWARD,))
