"""How long one micro-batch takes in a layer under a stock setting: each half forward, backward, and what runs again before it.

What a checkpoint runs again waits for its collectives again. Of experts a profile knows one figure: their parts are taken from a
dense layer's figures, by bytes or by width.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from megatron_lynx.anatomy import DENSE, MLP, Section, sections_of
from megatron_lynx.anatomy.dense import ACTIVATION
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.profiler.expert_tensors import expert_width, routed_rows
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.dense_bytes import treatment
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
        _expert_half(shape, profile, setting) if section.opaque else _dense_half(shape, profile, setting, section)
        for section in sections_of(experts=experts)
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
    assert profile.experts is not None, "a profile of such a layer has its figures"
    norm_s = profile.half(MLP.half).items[MLP.norm].forward_s
    forward_s = profile.experts.forward_s
    parts_s = {
        "layernorm": norm_s,
        "moe": forward_s - norm_s,
        "moe_act": _activation_s(shape, profile),
        "shared_experts": _shared_s(shape, profile),
    }
    again_s = sum(parts_s[name] for name in _outermost(setting.recompute) if name in parts_s)
    return HalfSeconds(forward_s, profile.experts.backward_s, again_s)


def _outermost(modules: Collection[str]) -> Collection[str]:
    """`moe` runs the others inside it."""
    return [name for name in modules if name in ("moe", "layernorm")] if "moe" in modules else modules


def _activation_s(shape: LayerShape, profile: Profile) -> float:
    """As long as a dense layer's for as many elements."""
    elements = routed_rows(shape) * expert_width(shape)
    return profile.half(MLP.half).items[ACTIVATION].forward_s * elements / (shape.tokens * shape.ffn)


def _shared_s(shape: LayerShape, profile: Profile) -> float:
    """As long as a dense layer's MLP of their width, collectives included."""
    if shape.model.experts is None or not shape.model.experts.shared_ffn:
        return 0.0
    items = profile.half(MLP.half).items
    inside_s = sum(items[name].forward_s for name in (MLP.column_parallel, *MLP.inner))
    waits_s = sum(window_lengths_s(profile, "fwd", DENSE[MLP.half], shape.gathered_bytes))
    return waits_s + inside_s * shape.model.experts.shared_ffn / shape.model.ffn
