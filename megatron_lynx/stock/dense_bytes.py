"""What a half of a dense layer holds under a stock setting.

made inside a checkpoint, and read there alone     made again
made by an item whose output is discarded          made again
read by offloaded modules alone                    in host memory; each of these modules copies it
every other tensor, and the half's input           stays
what a checkpoint was given and nobody else keeps  stays, too
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.anatomy import Section
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.held import HalfBytes
from megatron_lynx.stock.offload import offload_module
from megatron_lynx.stock.recompute import recompute_module, runs_again
from megatron_lynx.stock.setting import StockSetting


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

    @property
    def runs(self) -> tuple[str, ...]:
        """What runs again, in order."""
        return tuple(name for name in self.section.names if name in self.again | self.discarded)

    def makes_again(self, tensor: SavedTensor) -> bool:
        """Whether the tensor is not there between forward and backward, and then is again."""
        return tensor.made_by in self.discarded or (tensor.made_by in self.again and self.again.issuperset(tensor.saved_by))

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
    return Treatment(section, frozenset(again), frozenset(discarded), tuple(groups))


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
