"""What holding on to a run asks of a kind of section: which live layers have it, whose classes fit, what is refused, which hooks.

a kind says                            who asks
section_in       of a live layer       everybody: `kinds.running.sections_in`
classes          by role               `apply.layers`: linears that were shown to be replayed in every bit
refusals         modules               `apply.refusals`
mismatches       plan and live layers  `apply.match`
claims           hooks of its own      `apply.installation`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from torch.nn import Module

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.live_run import LiveRun
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.section import Half, Role, Section
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.engine import Engine

Classes = Mapping[Role, tuple[str, ...]]
"""By role the full names of the classes that a site may have; of roles that are left out it does not matter."""

Layers = Mapping[int, Module]
"""Live layers by number: those that have the kind."""


class Running(ABC):
    """One kind of section, as a run has it."""

    half: Half
    name: str
    """The name of its section."""
    stated_as: str = "model.kinds"
    """The key of a plan that says which layers have it."""
    recorded: str = ""
    """Which table of a release has the functions that matter with this kind alone; empty: it has none of its own."""
    recorded_as: str = ""
    """How a release that reads otherwise is told: "megatron-core's ... do not read as recorded"."""
    local: ClassVar[Classes] = {}
    te: ClassVar[Classes] = {}
    """The classes of its sites in Megatron's own layers, and in Transformer Engine's."""
    always_local: bool = True
    """Whether every release can build it of Megatron's own layers."""

    @abstractmethod
    def section_in(self, layer: Module) -> Section | None:
        """What fills the half of a live layer, if it is of this kind."""

    def refusals(self, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Problem]:
        """Why a run whose layers are of this kind cannot carry a plan."""
        yield from ()

    def mismatches(self, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Problem]:
        """Where the plan has another kind in place of this one, or this one in place of another."""
        planned = {number for number in run.layers if any(self.has(section) for section in plan.model.sections_of(number))}
        for numbers, said in ((layers.keys() - planned, "in this run alone"), (planned - layers.keys(), "in the plan alone")):
            if numbers:
                place = f"plan: {self.stated_as}: layers {', '.join(map(str, sorted(numbers)))}"
                yield Problem(place, f"{self.name} {said}", "the same in both", "make a plan for this model")

    def has(self, section: Section) -> bool:
        """Whether a section is of this kind."""
        return section.name == self.name

    def claims(self, engine: Engine, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Claim]:
        """Hooks that this kind alone needs, beside those on halves, sites and collectives."""
        yield from ()
