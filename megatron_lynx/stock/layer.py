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
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_lynx.anatomy import LayerKind, Section
from megatron_lynx.cost.combined import LayerSeconds
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.recompute import half_kept_bytes
from megatron_lynx.cost.stage import HalfSeconds, half_seconds
from megatron_lynx.kinds.experts.planning import expert_linears
from megatron_lynx.kinds.experts.section import BESIDE, DISPATCH, EXPERTS_FC1, SHARED_FC1
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.profile import Profile, SavedTensor
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.setting import LEAST_ELEMENTS, OF_OFFLOAD, OF_RECOMPUTE, StockSetting


@dataclass(frozen=True)
class HalfBytes:
    """Including the half's input."""

    stays: int
    again: int = 0
    """Recomputed at the beginning of its backward."""
    leaves: int = 0
    copied: int = 0
    """Copied in each direction: above `leaves` if a tensor is also kept on the device, or copied by two modules."""
    input_leaves: int = 0
    """Bytes of the half's input in `leaves`. The schedule keeps inputs received from another stage."""

    @property
    def received(self) -> HalfBytes:
        return replace(self, stays=self.stays + self.input_leaves, leaves=self.leaves - self.input_leaves, input_leaves=0)

    @property
    def kept_whole(self) -> HalfBytes:
        return HalfBytes(self.stays + self.leaves, self.again)


@dataclass(frozen=True)
class Treatment:
    section: Section
    again: frozenset[str]
    """Inside a checkpoint."""
    discarded: frozenset[str]
    """Items whose outputs are freed."""
    groups: tuple[frozenset[str], ...]
    """By offloaded module: items whose saved tensors it copies."""
    given: frozenset[str] = frozenset()
    """Linears that save their original input instead of its FP8 bytes, because it is freed (`set_save_original_input`)."""

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(name for name in self.section.names if name in self.again | self.discarded)

    def makes_again(self, tensor: SavedTensor) -> bool:
        if tensor.made_by in self.discarded or (tensor.saved_by == (tensor.made_by,) and tensor.made_by in self.given):
            return True
        return tensor.made_by in self.again and self.again.issuperset(tensor.saved_by)

    def copies(self, readers: tuple[str, ...]) -> int:
        return sum(not group.isdisjoint(readers) for group in self.groups)

    def sends_away(self, readers: tuple[str, ...]) -> bool:
        return frozenset[str]().union(*self.groups).issuperset(readers)


def treatment(shape: LayerShape, setting: StockSetting, section: Section) -> Treatment:
    """Return the items that the setting's modules select. Transformer Engine fuses a norm into the next linear: a module for
    norms then selects none, and a module for the linear selects both."""
    joined = {section.norm, section.column_parallel} if shape.model.uses_te and section.fuses_norm else set[str]()
    inside = {item.name: item.norm_inside for item in section.items if item.norm_inside and shape.model.uses_te}
    again, discarded = set[str](), set[str]()
    for module in map(OF_RECOMPUTE.__getitem__, setting.recompute):
        names = set(module.items(section))
        names |= {norm for linear, norm in inside.items() if linear in names}
        if module.discards_output:
            discarded |= names - joined
        else:
            again |= names | (joined if names & joined else set())
    groups = []
    for asked in map(OF_OFFLOAD.__getitem__, setting.offload):
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
    leaves = sum(size for size, readers in large if half_treatment.sends_away(readers))
    copied = leaves if section.in_some_layers else sum(size * half_treatment.copies(readers) for size, readers in large)
    return HalfBytes(
        stays=shape.input_bytes + sum(size for size, _ in blocks) + given_bytes - leaves,
        again=sum(tensor.bytes for tensor in tensors) - sum(tensor.bytes for tensor in kept),
        leaves=leaves,
        copied=copied,
        input_leaves=shape.input_bytes if (shape.input_bytes, inputs) in large and half_treatment.sends_away(inputs) else 0,
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
    recomputed = (module for module in map(OF_RECOMPUTE.__getitem__, setting.recompute) if module.items(section))
    offloaded = (module for module in map(OF_OFFLOAD.__getitem__, setting.offload) if module.items(section))
    return StockSetting(tuple(module.name for module in recomputed), offload=tuple(module.name for module in offloaded))


def layer_seconds(shape: LayerShape, profile: Profile, setting: StockSetting, kind: LayerKind | None = None) -> LayerSeconds:
    sections = kind or shape.model.kind_sections(experts=False)
    return tuple(_half(shape, profile, setting, section) for section in sections)


def _half(shape: LayerShape, profile: Profile, setting: StockSetting, section: Section) -> HalfSeconds:
    again_s = _experts_again_s if section.exchanges else _again_s
    return replace(half_seconds(profile, section), again_s=again_s(shape, profile, setting, section))


def _again_s(shape: LayerShape, profile: Profile, setting: StockSetting, section: Section) -> float:
    if section.opaque:
        return 0.0
    runs = treatment(shape, setting, section).runs
    again_s = sum(profile.of(section).items[name].forward_s for name in runs)
    if section.row_parallel in runs:
        again_s += sum(window_lengths_s(profile, "fwd", section, shape.gathered_bytes))
    return again_s


def _experts_again_s(shape: LayerShape, profile: Profile, setting: StockSetting, section: Section) -> float:
    """Seconds of recomputation in an expert half. `moe` repeats the exchange of rows, and shared experts repeat their
    collectives."""
    assert profile.experts is not None, "a profile of such a layer has its figures"
    runs, half = treatment(shape, setting, section).runs, profile.experts
    again_s = sum(half.items[name].forward_s for name in runs)
    again_s += 2 * (half.exchange_s + half.cut_s) * (DISPATCH in runs) + 2 * half.collective_s * (SHARED_FC1 in runs)
    return again_s - (sum(half.beside_s("fwd", role) for role in BESIDE) if DISPATCH in runs else 0.0)
