"""Bytes and seconds of one micro-batch in one layer under a stock setting. A checkpoint's recomputation repeats its collectives.

tensor                                              where it is between forward and backward
made inside a checkpoint, and read only there       recomputed
made by an item whose output is discarded           recomputed
read only by offloaded modules                      host memory; each of these modules copies it
all others, and the half's input                    device
arguments of a checkpoint that nothing else saves   device

The half of a layer with experts, and the items of Megatron's modules in it:

    norm ── shared experts        router  dispatch ── first GEMM ── activation ── second GEMM  combine
    layernorm  shared_experts                                       moe_act
               └────────────────────────────────── moe ──────────────────────────────────────┘
    mlp_norm                                          expert_fc1    moe_act                          (offloaded)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron_lynx.anatomy import LayerKind, Section
from megatron_lynx.cost.combined import LayerSeconds
from megatron_lynx.cost.communication import again_s
from megatron_lynx.cost.recompute import half_kept_bytes
from megatron_lynx.cost.stage import HalfSeconds, half_seconds
from megatron_lynx.kinds.experts.planning import expert_linears
from megatron_lynx.kinds.experts.section import EXPERTS_FC1
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.profile import Profile, SavedTensor
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.setting import LEAST_ELEMENTS, OFFLOADED, RECOMPUTED, StockSetting


class HalfBytes(NamedTuple):
    """Including the half's input."""

    stays: int = 0
    again: int = 0
    """Recomputed at the beginning of its backward."""
    leaves: int = 0
    copied: int = 0
    """Copied in each direction: above `leaves` if a tensor is also kept on the device, or copied by two modules."""
    input_leaves: int = 0
    """Bytes of the half's input in `leaves`. The schedule keeps inputs received from another stage."""

    def keeping(self, left_bytes: int) -> HalfBytes:
        """Return the half with a part of `leaves` on the device, too."""
        return self._replace(stays=self.stays + left_bytes, leaves=self.leaves - left_bytes)


class Treatment(NamedTuple):
    section: Section
    again: frozenset[str]
    """Inside a checkpoint."""
    discarded: frozenset[str]
    """Items whose outputs are freed."""
    groups: tuple[frozenset[str], ...]
    """By offloaded module: items whose saved tensors it copies."""
    given: frozenset[str]
    """Linears that save their original input instead of its FP8 bytes, because it is freed (`set_save_original_input`)."""

    def makes_again(self, tensor: SavedTensor) -> bool:
        if tensor.made_by in self.discarded or (tensor.saved_by == (tensor.made_by,) and tensor.made_by in self.given):
            return True
        return tensor.made_by in self.again and self.again.issuperset(tensor.saved_by)


def treatment(shape: LayerShape, setting: StockSetting, section: Section) -> Treatment:
    """Return the items that the setting's modules select. Transformer Engine fuses a norm into the next linear: a module for
    norms then selects none, and a module for the linear selects both."""
    joined = {section.norm, section.column_parallel} if shape.model.uses_te and section.fuses_norm else set[str]()
    inside = {item.name: item.norm_inside for item in section.items if item.norm_inside and shape.model.uses_te}
    again, discarded = set[str](), set[str]()
    for module in map(RECOMPUTED.__getitem__, setting.recompute):
        names = set(module.items(section))
        names |= {norm for linear, norm in inside.items() if linear in names}
        if module.discards_output:
            discarded |= names - joined
        else:
            again |= names | (joined if names & joined else set())
    groups = []
    for asked in map(OFFLOADED.__getitem__, setting.offload):
        names = set(asked.items(section)) - (joined if "norm" in asked.roles else set())
        groups.append(frozenset(names | joined if names & joined else names) - again)
    return Treatment(section, frozenset(again), frozenset(discarded), tuple(groups), _given(shape, section, discarded))


def _given(shape: LayerShape, section: Section, discarded: Collection[str]) -> frozenset[str]:
    """Linears after freed outputs. With delayed scaling none can save its original input."""
    if shape.model.fp8_recipe in (None, "delayed"):
        return frozenset()
    behind = {name for name in section.linears if section.before(name) in discarded}
    if section.norm in discarded:
        behind |= {item.name for item in section.items if item.role in ("down_projection", "query_projection")}
    return frozenset(behind)


@lru_cache(maxsize=4096)
def _half_bytes(shape: LayerShape, setting: StockSetting, section: Section, least_bytes: int) -> HalfBytes:
    if section.opaque:
        return HalfBytes(half_kept_bytes(shape, section))
    half_treatment = treatment(shape, setting, section)
    tensors = [tensor for tensor in _saved(shape, section, half_treatment) if tensor.saved_by]
    kept = [tensor for tensor in tensors if not half_treatment.makes_again(tensor)]
    blocks = [(tensor.bytes, _readers(shape, section, tensor)) for tensor in kept]
    given_bytes = planning_of(section).core_arguments_bytes(shape) if half_treatment.again.intersection(_cores(section)) else 0
    inputs = (section.norm,) if section.norm not in half_treatment.again else ()  # else the checkpoint holds it
    large = [(size, readers) for size, readers in [*blocks, (shape.input_bytes, inputs)] if size >= least_bytes and readers]
    groups, away = half_treatment.groups, frozenset[str]().union(*half_treatment.groups)
    leaves = sum(size for size, readers in large if away.issuperset(readers))
    copied = sum(size for size, readers in large for group in groups if not group.isdisjoint(readers))
    return HalfBytes(
        stays=shape.input_bytes + sum(size for size, _ in blocks) + given_bytes - leaves,
        again=sum(tensor.bytes for tensor in tensors) - sum(tensor.bytes for tensor in kept),
        leaves=leaves,
        copied=leaves if section.in_some_layers else copied,
        input_leaves=shape.input_bytes if (shape.input_bytes, inputs) in large and away.issuperset(inputs) else 0,
    )


ORIGINAL_INPUT = ("tensorwise", "blockwise")
"""FP8 recipes with which the experts' first linear saves its input in 16 bits if it is offloaded: `GroupedMLP` calls
`set_save_original_input` (0.17 and 0.18 for MXFP8 and NVFP4, too)."""


def _saved(shape: LayerShape, section: Section, half_treatment: Treatment) -> Iterator[SavedTensor]:
    if half_treatment.again.intersection(_cores(section)):  # with its own keys and values; other ranks' are exchanged again
        layout = shape.parallel.model_copy(update={"context_exchange": "all_gather", "context_levels": None})
        shape = replace(shape, parallel=layout)
    offloaded = shape.model.fp8_recipe in ORIGINAL_INPUT and any(EXPERTS_FC1 in group for group in half_treatment.groups)
    for tensor in planning_of(section).tensors(shape):
        if offloaded and tensor.made_by == EXPERTS_FC1 and not tensor.output:
            linear = expert_linears(shape)[EXPERTS_FC1]
            original_bytes = linear.times * linear.rows * linear.taken * shape.model.element_bytes
            tensor = tensor.model_copy(update={"bytes": original_bytes, "blocks": 1})
        yield tensor


def _readers(shape: LayerShape, section: Section, tensor: SavedTensor) -> tuple[str, ...]:
    """Items that read a tensor in backward. Fused attention kernels read their output, which the next linear keeps anyway."""
    fused = shape.model.attention == "flash" and (tensor.made_by, tensor.output) in [(name, True) for name in _cores(section)]
    return tuple(dict.fromkeys((*tensor.saved_by, tensor.made_by))) if fused else tensor.saved_by


def _cores(section: Section) -> tuple[str, ...]:
    return tuple(item.name for item in section.items if item.role == "core")


LayerBytes = tuple[HalfBytes, ...]


def layer_bytes(
    shape: LayerShape, setting: StockSetting, kind: LayerKind | None = None, least: int = LEAST_ELEMENTS
) -> LayerBytes:
    """Return a layer's bytes with modules recomputed or offloaded. `kind`: the layer's, or None for a usual one. `least`:
    elements of the smallest offloaded tensor."""
    sections, least_bytes = kind or shape.model.kind_sections(experts=False), least * shape.model.element_bytes
    return tuple(_half_bytes(shape, _of_section(setting, section), section, least_bytes) for section in sections)


@lru_cache(maxsize=4096)
def _of_section(setting: StockSetting, section: Section) -> StockSetting:
    recomputed = tuple(name for name in setting.recompute if RECOMPUTED[name].items(section))
    return StockSetting(recomputed, offload=tuple(name for name in setting.offload if OFFLOADED[name].items(section)))


def layer_seconds(shape: LayerShape, profile: Profile, setting: StockSetting, kind: LayerKind | None = None) -> LayerSeconds:
    sections = kind or shape.model.kind_sections(experts=False)
    return tuple(_half_seconds(shape, profile, setting, section) for section in sections)


def _half_seconds(shape: LayerShape, profile: Profile, setting: StockSetting, section: Section) -> HalfSeconds:
    seconds = half_seconds(profile, section)
    if section.opaque:
        return seconds
    chosen, items = treatment(shape, setting, section), profile.of(section).items
    computing_s = sum(items[name].forward_s for name in section.names if name in chosen.again | chosen.discarded)
    return replace(seconds, again_s=computing_s + again_s(profile, section, chosen.again))
