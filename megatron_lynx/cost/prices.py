"""What the halves of one plan cost, each price worked out once: most layers of a model are treated alike.

a plan's halves, one by one ──section, choice──> known? ──no──> priced from the profile
                                                    └─yes─> the same price
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megatron_lynx.anatomy import Half, Pass, Section
from megatron_lynx.cost.communication import gather_lost_and_spared_s, window_lengths_s
from megatron_lynx.cost.host import HostSeconds, half_host_s
from megatron_lynx.cost.replay import Checkpoint
from megatron_lynx.cost.section import PricedSection, priced
from megatron_lynx.cost.weight_gradient import WeightGradient, weight_gradient
from megatron_lynx.profiler.profile import Profile


@dataclass(frozen=True)
class Prices:
    """The prices of halves from one profile."""

    profile: Profile
    less_in_hand_bytes: Mapping[Half, int] = field(default_factory=dict)
    """While a half runs backward (`cost.in_hand`); empty where the job is not known, and only layers' own bytes are asked for."""
    _sections: dict[tuple[Section, Collection[str], Checkpoint | None], PricedSection] = field(default_factory=dict)
    _hosts: dict[tuple[Section, Collection[str], bool, bool, int], HostSeconds] = field(default_factory=dict)
    _gathers: dict[tuple[Section, Section | None, bool], tuple[float, float]] = field(default_factory=dict)
    _windows: dict[tuple[Pass, Section, Collection[str]], tuple[float, ...]] = field(default_factory=dict)
    _weight_gradients: dict[tuple[Section, str], WeightGradient] = field(default_factory=dict)

    def of(self, section: Section, replay: Collection[str], checkpoint: Checkpoint | None = None) -> PricedSection:
        """A half in which these items, in their order, are replayed."""
        key = section, replay, checkpoint
        if key not in self._sections:
            less = self.less_in_hand_bytes.get(section.half, 0)
            self._sections[key] = priced(self.profile, section, replay, checkpoint, less)
        return self._sections[key]

    def host(
        self, section: Section, replay: Collection[str], *, checkpointed: bool, offloads: bool, deferred: int
    ) -> HostSeconds:
        """What the host takes to issue such a half, in which so many weight gradients are deferred."""
        key = section, replay, checkpointed, offloads, deferred
        if key not in self._hosts:
            self._hosts[key] = half_host_s(
                self.profile, section, replay, checkpointed=checkpointed, offloads=offloads, deferred=deferred
            )
        return self._hosts[key]

    def gathered_s(self, section: Section, behind: Section | None, *, whole: bool) -> tuple[float, float]:
        """What gathering a half's input behind another's first collective delays, and what it spares (`cost.communication`)."""
        key = section, behind, whole
        if key not in self._gathers:
            self._gathers[key] = gather_lost_and_spared_s(self.profile, *key[:2], self.message_bytes, whole=whole)
        return self._gathers[key]

    def windows_s(self, passing: Pass, section: Section, deferred: Collection[str]) -> tuple[float, ...]:
        """How long the windows of a half are in one pass, where these linears put their weight gradients off."""
        key = passing, section, deferred
        if key not in self._windows:
            self._windows[key] = window_lengths_s(self.profile, passing, section, self.message_bytes, deferred)
        return self._windows[key]

    def weight_gradient(self, section: Section, linear: str) -> WeightGradient:
        """What one weight gradient that is deferred takes and holds."""
        key = section, linear
        if key not in self._weight_gradients:
            self._weight_gradients[key] = weight_gradient(self.profile, section, linear)
        return self._weight_gradients[key]

    @cached_property
    def message_bytes(self) -> int:
        """What a tensor-parallel collective of a layer moves."""
        return self.profile.message_bytes
