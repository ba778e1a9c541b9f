"""Chooses weight gradients that run once the gradient of their chunk's input is sent. The stage before does not wait for them.

    held   ╲  backward k                     the lowest layers first: their operands wait shortest, where memory is freest
            ╲___ linear_fc1(2) ___ ... sent

A weight gradient that hides a wait of its half leaves that wait exposed if it is delayed. So plans with and without
these are made, and the rehearsal decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lynx.anatomy.address import SEND_BACKWARD
from megatron_lynx.config.job import Job
from megatron_lynx.cost.in_hand import less_in_hand_bytes
from megatron_lynx.cost.section import Prices
from megatron_lynx.plan.facts import LayerRange
from megatron_lynx.plan.plan import Plan, Stage, WeightGradients
from megatron_lynx.plan.rule import joined
from megatron_lynx.planner.rooms import Rooms
from megatron_lynx.planner.slack import Slack
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.units import MIB


@dataclass(frozen=True)
class SendingFirst:
    """`simulation`: of the plan. `hiding`: whether linears are delayed whose weight gradients hide waits."""

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
        before = 0 if entry.weight_gradients is None else entry.weight_gradients.bytes
        most_bytes = before + slack.most_taken_bytes + max(rooms.cost(linear).bytes for linear in linears)
        bound = WeightGradients(bytes=-(-most_bytes // MIB) * MIB)
        return entry.model_copy(update={"rules": joined(rules), "weight_gradients": bound})

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
