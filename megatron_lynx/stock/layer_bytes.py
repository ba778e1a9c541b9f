"""What one layer holds of one micro-batch under a stock setting: its two halves, or its input alone where it is recomputed whole.

made inside a checkpoint, and read there alone     made again
made by an item whose output is discarded          made again
read by offloaded modules alone                    in host memory; each of these modules copies it
every other tensor, and the half's input           stays
what a checkpoint was given and nobody else keeps  stays, too

The half of a layer with experts, and which words of Megatron's concern what of it:

    norm ── shared experts        router  dispatch ── first GEMM ── activation ── second GEMM  combine
    layernorm  shared_experts                                       moe_act
               └────────────────────────────────── moe ──────────────────────────────────────┘
    mlp_norm                                          expert_fc1    moe_act                          (offloaded)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from megatron_lynx.anatomy import LayerKind, Section
from megatron_lynx.cost.layer import half_kept_bytes
from megatron_lynx.kinds.experts.saved import expert_tensors, experts_of
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.modules import LEAST_ELEMENTS, NORM_OUT, offload_module, recompute_module, runs_again
from megatron_lynx.stock.setting import StockSetting


@dataclass(frozen=True)
class HalfBytes:
    """Bytes, the half's input included."""

    stays: int
    """On the device from forward to backward."""
    again: int = 0
    """Made again when its backward begins."""
    leaves: int = 0
    """In host memory from forward to backward."""
    copied: int = 0
    """What goes to the host, and comes back: more than `leaves` where somebody else holds on to it, or two modules copy it."""
    input_leaves: int = 0
    """The part of `leaves` that is the half's input. The schedule holds on to what a stage has received."""

    @property
    def received(self) -> HalfBytes:
        """The same where another stage has sent the input."""
        return replace(self, stays=self.stays + self.input_leaves, leaves=self.leaves - self.input_leaves, input_leaves=0)

    @property
    def kept_whole(self) -> HalfBytes:
        """The same where nothing of it is offloaded after all."""
        return HalfBytes(self.stays + self.leaves, self.again)


@dataclass(frozen=True)
class Treatment:
    """What a setting's modules do to one section, by names of its items."""

    section: Section
    again: frozenset[str]
    """Inside a checkpoint."""
    discarded: frozenset[str]
    """Those whose outputs are freed."""
    groups: tuple[frozenset[str], ...]
    """By offloaded module: the items whose saved tensors it copies."""
    given: frozenset[str] = frozenset()
    """Linears that keep what they were given in place of its bytes in FP8, because it is freed (`set_save_original_input`)."""

    @property
    def runs(self) -> tuple[str, ...]:
        """What runs again, in order."""
        return tuple(name for name in self.section.names if name in self.again | self.discarded)

    def makes_again(self, tensor: SavedTensor) -> bool:
        """Whether the tensor is not there between forward and backward, and then is again."""
        if tensor.made_by in self.discarded or (tensor.saved_by == (tensor.made_by,) and tensor.made_by in self.given):
            return True
        return tensor.made_by in self.again and self.again.issuperset(tensor.saved_by)

    def copies(self, readers: tuple[str, ...]) -> int:
        """How many modules copy what these items read in backward."""
        return sum(not group.isdisjoint(readers) for group in self.groups)

    def sends_away(self, readers: tuple[str, ...]) -> bool:
        """Whether nobody on the device holds on to what these items read."""
        return frozenset[str]().union(*self.groups).issuperset(readers)


def treatment(shape: LayerShape, setting: StockSetting, section: Section) -> Treatment:
    """With Transformer Engine the norm is a part of the linear behind it: a module for norms finds none, and one for the linear
    has both."""
    joined = {section.norm, section.column_parallel} if shape.model.uses_te and section.fuses_norm else set[str]()
    inside = {item.name: item.norm_inside for item in section.items if item.norm_inside and shape.model.uses_te}
    again, discarded = set[str](), set[str]()
    for module in map(recompute_module, setting.recompute):
        names = set(runs_again(module, section))
        names |= {norm for linear, norm in inside.items() if linear in names}
        if module.discards_output:
            discarded |= names - joined
        else:
            again |= names | (joined if names & joined else set())
    groups = []
    for asked in map(offload_module, setting.offload):
        names = {item.name for item in section.items if section.half == asked.section.half and item.role == asked.role}
        if asked.role == "norm":
            names -= joined
        groups.append(frozenset(names | joined if names & joined else names) - again)
    return Treatment(section, frozenset(again), frozenset(discarded), tuple(groups), _given(shape, section, discarded))


def _given(shape: LayerShape, section: Section, discarded: Collection[str]) -> frozenset[str]:
    """The linears behind what is freed. With delayed scaling none can keep what it was given."""
    if shape.model.fp8_recipe in (None, "delayed"):
        return frozenset()
    behind = {name for name in section.linears if section.before(name) in discarded}
    if section.norm in discarded:
        behind |= {item.name for item in section.items if item.role in ("down_projection", "query_projection")}
    return frozenset(behind)


def dense_half_bytes(shape: LayerShape, setting: StockSetting, section: Section, least_bytes: int) -> HalfBytes:
    """`least_bytes`: of the smallest tensor that is offloaded."""
    own = treatment(shape, setting, section)
    tensors = [tensor for tensor in planning_of(section).tensors(shape) if tensor.saved_by]
    kept = [tensor for tensor in tensors if not own.makes_again(tensor)]
    blocks = [(tensor.bytes, _readers(shape, section, tensor)) for tensor in kept]
    given_bytes = planning_of(section).core_arguments_bytes(shape) if own.again.intersection(_cores(section)) else 0
    inputs = (section.norm,) if section.norm not in own.again else ()  # else the checkpoint holds it
    large = [(size, readers) for size, readers in [*blocks, (shape.input_bytes, inputs)] if size >= least_bytes and readers]
    leaves = sum(size for size, readers in large if own.sends_away(readers))
    return HalfBytes(
        stays=shape.input_bytes + sum(size for size, _ in blocks) + given_bytes - leaves,
        again=sum(tensor.bytes for tensor in tensors) - sum(tensor.bytes for tensor in kept),
        leaves=leaves,
        copied=sum(size * own.copies(readers) for size, readers in large),
        input_leaves=shape.input_bytes if (shape.input_bytes, inputs) in large and own.sends_away(inputs) else 0,
    )


def _readers(shape: LayerShape, section: Section, tensor: SavedTensor) -> tuple[str, ...]:
    """Who reads a tensor in backward. Fused attention kernels read what they made, which the linear behind them keeps anyway."""
    fused = shape.model.attention == "flash" and (tensor.made_by, tensor.output) in [(name, True) for name in _cores(section)]
    return tuple(dict.fromkeys((*tensor.saved_by, tensor.made_by))) if fused else tensor.saved_by


def _cores(section: Section) -> tuple[str, ...]:
    return tuple(item.name for item in section.items if item.role == "core")


def expert_half_bytes(shape: LayerShape, setting: StockSetting, least_bytes: int) -> HalfBytes:
    """`least_bytes`: of the smallest tensor that is offloaded."""
    own = expert_treatment(shape, setting)
    tensors = [tensor for tensor in expert_tensors(shape) if tensor.saved_by]
    kept = [tensor for tensor in tensors if not own.makes_again(tensor)]
    inputs = (own.section.norm,) if shape.input_bytes >= least_bytes else ()
    large = [(tensor.bytes, tensor.saved_by) for tensor in kept if tensor.bytes >= least_bytes] + [(shape.input_bytes, inputs)]
    leaves = sum(size for size, readers in large if readers and own.sends_away(readers))
    kept_bytes = sum(tensor.bytes for tensor in kept)
    return HalfBytes(
        shape.input_bytes + kept_bytes - leaves, sum(tensor.bytes for tensor in tensors) - kept_bytes, leaves, leaves, 0
    )


def expert_treatment(shape: LayerShape, setting: StockSetting) -> Treatment:
    """What a setting's modules do to the items of the half."""
    section = experts_of(shape).section
    again, discarded = set[str](), set[str]()
    for module in map(recompute_module, setting.recompute):
        (discarded if module.discards_output else again).update(name for name in module.experts if name in section.names)
    groups = (frozenset({item}) - again for item in (offload_module(name).experts for name in setting.offload) if item)
    return Treatment(section, frozenset(again), frozenset(discarded), tuple(groups), _given(shape, section, discarded))


LayerBytes = tuple[HalfBytes, ...]
"""By half, in the order of a forward."""


@lru_cache(maxsize=4096)
def layer_bytes(
    shape: LayerShape, setting: StockSetting, kind: LayerKind | None = None, least: int = LEAST_ELEMENTS
) -> LayerBytes:
    """One layer whose modules are recomputed or offloaded. `kind`: of layer; None: a usual one. `least`: elements of the smallest
    tensor that is offloaded."""
    sections, least_bytes = kind or shape.model.kind_sections(experts=False), least * shape.model.element_bytes
    return tuple(_half_bytes(shape, setting, section, least_bytes) for section in sections)


def _half_bytes(shape: LayerShape, setting: StockSetting, section: Section, least_bytes: int) -> HalfBytes:
    if section.opaque:
        again = norm_out_bytes(shape, setting, section)
        return HalfBytes(half_kept_bytes(shape, section) - again, again)
    if section.in_some_layers:
        return expert_half_bytes(shape, setting, least_bytes)
    return dense_half_bytes(shape, setting, section, least_bytes)


def norm_out_bytes(shape: LayerShape, setting: StockSetting, section: Section) -> int:
    """Bytes of an opaque half that a setting frees and recomputes: those of `gdn_norm_out` alone. They are exact, so they have
    no margin."""
    freed = shape.model.opaque_in(section).norm_out_bytes if NORM_OUT in setting.recompute else 0
    return ceil(freed * shape.tokens / shape.parallel.tensor)
