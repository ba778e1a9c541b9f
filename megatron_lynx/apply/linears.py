"""The linears of a live run whose weight gradients a plan defers."""

from __future__ import annotations

from typing import NamedTuple

from torch.nn import Module

from megatron_lynx.anatomy import Half, Role
from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.apply.live_run import LiveRun
from megatron_lynx.apply.site import modules_named, sections_in
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.pending import Linear


class LinearOf(NamedTuple):
    """One linear of one layer."""

    layer: int
    half: Half
    item: str
    role: Role

    @property
    def frame(self) -> FrameKey:
        """The half that it is in."""
        return self.layer, self.half

    @property
    def linear(self) -> Linear:
        """As the runtime knows it."""
        return self.layer, self.item

    @property
    def place(self) -> str:
        return f"layer {self.layer}.{self.item}"


def deferring_linears(plan: Plan, run: LiveRun) -> dict[LinearOf, Module]:
    """Those of this rank, in the order of a forward."""
    found: dict[LinearOf, Module] = {}
    for entry in plan.chunks_of(run.stage):
        for layer in entry.layers:
            names = entry.rule_for(layer).weight_gradients
            for section in sections_in(run.layers[layer]) if names else ():
                for item, module in modules_named(section, run.layers[layer], names):
                    found[LinearOf(layer, section.half, item.name, item.role)] = module
    return found
