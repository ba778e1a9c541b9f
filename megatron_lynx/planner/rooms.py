"""Waits of a chunk's layers, with the time that recomputation leaves in them, and the weight gradients that may run there.

backward of layer l    bwd.mlp.0 │ linear_fc2 │ bwd.mlp.1 │ linear_fc1 │ bwd.mlp.2   bwd.attention.0 │ linear_proj │ ...
linear_fc2 of l                               └──────────────── may run in these, then in bwd.mlp.0 of l - 1 ──>
any linear of l        and in the next forward, in the collectives of its own layer
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_lynx.anatomy import HALVES, Half, Section
from megatron_lynx.anatomy.address import WindowAddress, window_name
from megatron_lynx.cost.section import Prices, WeightGradient
from megatron_lynx.once import once
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.plan.timetables import layout_of, planned_halves
from megatron_lynx.planner.packing import LONG, Linear, Put, Wait
from megatron_lynx.rehearsal import treated_halves
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
