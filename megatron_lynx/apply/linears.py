"""The linears of a live run whose weight gradients a plan defers."""

from __future__ import annotations

from typing import NamedTuple

from torch.nn import Module, Parameter

from megatron_lynx.anatomy import EXPERTS_LINEARS, Half, Role
from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.apply.live_run import LiveRun
from megatron_lynx.apply.site import modules_named
from megatron_lynx.kinds.running import sections_in
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.pending import Linear


class LinearOf(NamedTuple):
    """One linear of one layer."""

    layer: int
    half: Half
    item: str
    role: Role
    expert: int | None = None
    """Which of a rank's experts it is of, where it has several that run one by one."""

    @property
    def frame(self) -> FrameKey:
        """The half that it is in."""
        return self.layer, self.half

    @property
    def linear(self) -> Linear:
        """As the runtime knows it."""
        return self.layer, self.item

    @property
    def of_experts(self) -> bool:
        """Whether it is of one of several experts, or of all."""
        return self.role in EXPERTS_LINEARS

    @property
    def place(self) -> str:
        return f"layer {self.layer}.{self.item}{'' if self.expert is None else f'[{self.expert}]'}"


def weights_of(linear: Module) -> list[Parameter]:
    """Its weight, or those of all experts of which it computes the GEMMs."""
    return [parameter for name, parameter in linear.named_parameters(recurse=False) if name.startswith("weight")]


def deferring_linears(plan: Plan, run: LiveRun) -> dict[LinearOf, Module]:
    """Those of this rank, in the order of a forward."""
    found: dict[LinearOf, Module] = {}
    for entry in plan.chunks_of(run.stage):
        for layer in entry.layers:
            names = entry.rule_for(layer).weight_gradients
            for section in sections_in(run.layers[layer]) if names else ():
                for item, expert, module in modules_named(section, run.layers[layer], names):
                    found[LinearOf(layer, section.half, item.name, item.role, expert)] = module
    return found
