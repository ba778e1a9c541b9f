"""Cached prices of the halves of a plan: most layers are treated alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron_lynx.anatomy import Half, Pass, Section
from megatron_lynx.cost.communication import gather_lost_and_spared_s, window_lengths_s
from megatron_lynx.cost.host import HostSeconds, half_host_s
from megatron_lynx.cost.replay import Checkpoint
from megatron_lynx.cost.section import PricedSection, priced
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import BF16_BYTES, cast_bytes


@dataclass(frozen=True)
class Prices:
    """Prices of halves under one profile."""

    profile: Profile
    less_in_hand_bytes: Mapping[Half, int] = field(default_factory=dict)
    """By half, in backward (`cost.in_hand`); empty if only the layers' own bytes matter."""
    _sections: dict[tuple[Section, Collection[str], Checkpoint | None], PricedSection] = field(default_factory=dict)
    _hosts: dict[tuple[Section, Collection[str], bool, bool, int], HostSeconds] = field(default_factory=dict)
    _gathers: dict[tuple[Section, Section | None, bool], tuple[float, float]] = field(default_factory=dict)
    _windows: dict[tuple[Pass, Section, Collection[str]], tuple[float, ...]] = field(default_factory=dict)
    _weight_gradients: dict[tuple[Section, str], WeightGradient] = field(default_factory=dict)

    def of(self, section: Section, replay: Collection[str], checkpoint: Checkpoint | None = None) -> PricedSection:
        """Return the price of a half that recomputes these items."""
        key = section, replay, checkpoint
        if key not in self._sections:
            less = self.less_in_hand_bytes.get(section.half, 0)
            self._sections[key] = priced(self.profile, section, replay, checkpoint, less)
        return self._sections[key]

    def host(
        self, section: Section, replay: Collection[str], *, checkpointed: bool, offloads: bool, deferred: int
    ) -> HostSeconds:
        """Return the host time of such a half. `deferred`: number of delayed weight gradients."""
        key = section, replay, checkpointed, offloads, deferred
        if key not in self._hosts:
            self._hosts[key] = half_host_s(
                self.profile, section, replay, checkpointed=checkpointed, offloads=offloads, deferred=deferred
            )
        return self._hosts[key]

    def gathered_s(self, section: Section, behind: Section | None, *, whole: bool) -> tuple[float, float]:
        """Return (lost, saved) seconds of gathering a half's input once (`cost.communication`)."""
        key = section, behind, whole
        if key not in self._gathers:
            self._gathers[key] = gather_lost_and_spared_s(self.profile, *key[:2], self.message_bytes, whole=whole)
        return self._gathers[key]

    def windows_s(self, passing: Pass, section: Section, deferred: Collection[str]) -> tuple[float, ...]:
        """Return the windows of a half in one pass. `deferred`: linears with delayed weight gradients."""
        key = passing, section, deferred
        if key not in self._windows:
            self._windows[key] = window_lengths_s(self.profile, passing, section, self.message_bytes, deferred)
        return self._windows[key]

    def weight_gradient(self, section: Section, linear: str) -> WeightGradient:
        """Return the cost of one delayed weight gradient."""
        key = section, linear
        if key not in self._weight_gradients:
            self._weight_gradients[key] = weight_gradient(self.profile, section, linear)
        return self._weight_gradients[key]

    @cached_property
    def message_bytes(self) -> int:
        """Return the message of a tensor-parallel collective."""
        return self.profile.message_bytes


class WeightGradient(NamedTuple):
    """One linear's, for one micro-batch."""

    seconds: float
    input_bytes: int
    """Its input, all rows."""
    gradient_bytes: int
    """Gradient of its output, all rows."""

    @property
    def bytes(self) -> int:
        return self.input_bytes + self.gradient_bytes


def weight_gradient(profile: Profile, section: Section, linear: str) -> WeightGradient:
    item = profile.of(section).items[linear]
    input_bytes, gradient_bytes = planning_of(section).operands_bytes(profile, linear)
    if (recipe := profile.shape.fp8) is not None:
        input_bytes, gradient_bytes = 2 * input_bytes, 2 * cast_bytes(recipe, gradient_bytes // BF16_BYTES)
    return WeightGradient(item.wgrad_s or item.backward_s / 2, input_bytes, gradient_bytes)
