"""How long one micro-batch takes in a layer under a stock setting: each half forward, backward, and what runs again before it.

What a checkpoint runs again waits for its collectives again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_lynx.anatomy import Section
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.kinds.experts.section import DISPATCH, SHARED_FC1
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.dense_bytes import treatment
from megatron_lynx.stock.expert_bytes import expert_treatment
from megatron_lynx.stock.setting import StockSetting


@dataclass(frozen=True)
class HalfSeconds:
    """One micro-batch in one half."""

    forward_s: float
    backward_s: float
    again_s: float = 0.0

    @property
    def whole_backward_s(self) -> float:
        return self.again_s + self.backward_s

    @property
    def recomputed_whole(self) -> HalfSeconds:
        """The same where all of it runs again."""
        return replace(self, again_s=self.forward_s)


LayerSeconds = tuple[HalfSeconds, ...]
"""By half, in the order of a forward."""


def layer_seconds(shape: LayerShape, profile: Profile, setting: StockSetting, experts: bool = False) -> LayerSeconds:
    """A layer whose modules are recomputed."""
    return tuple(
        _expert_half(shape, profile, setting) if section.in_some_layers else _dense_half(shape, profile, setting, section)
        for section in shape.model.kind_sections(experts=experts)
    )


def recomputed_whole(layer: LayerSeconds) -> LayerSeconds:
    """The layer in one checkpoint."""
    return tuple(half.recomputed_whole for half in layer)


def _dense_half(shape: LayerShape, profile: Profile, setting: StockSetting, section: Section) -> HalfSeconds:
    half = profile.half(section.half)
    forward_s, backward_s = (sum(window_lengths_s(profile, way, section, shape.gathered_bytes)) for way in ("fwd", "bwd"))
    runs = treatment(shape, setting, section).runs
    again_s = sum(half.items[name].forward_s for name in runs)
    if section.row_parallel in runs:
        again_s += forward_s
    return HalfSeconds(half.forward_s + forward_s, half.backward_s + backward_s, again_s)


def _expert_half(shape: LayerShape, profile: Profile, setting: StockSetting) -> HalfSeconds:
    """What is run again with `moe` exchanges its rows again, and with shared experts waits for their collectives."""
    assert profile.experts is not None, "a profile of such a layer has its figures"
    own, half = expert_treatment(shape, setting), profile.experts
    again_s = sum(half.items[name].forward_s for name in own.runs)
    again_s += 2 * (half.exchange_s + half.cut_s) * (DISPATCH in own.runs) + 2 * half.collective_s * (SHARED_FC1 in own.runs)
    return HalfSeconds(half.forward_s, half.backward_s, again_s)
