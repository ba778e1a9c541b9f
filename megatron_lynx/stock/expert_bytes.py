"""What the half of a layer with experts holds under a stock setting.

    norm ── shared experts        router  dispatch ── first GEMM ── activation ── second GEMM  combine
    layernorm  shared_experts                                       moe_act
               └────────────────────────────────── moe ──────────────────────────────────────┘
    mlp_norm                                          expert_fc1    moe_act                          (offloaded)

made inside a checkpoint, and read there alone     made again
made by an item whose output is discarded          made again
read by offloaded modules alone                    in host memory
"""

from __future__ import annotations

from megatron_lynx.kinds.experts.saved import expert_tensors, experts_of
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.dense_bytes import Treatment
from megatron_lynx.stock.held import HalfBytes
from megatron_lynx.stock.offload import offload_module
from megatron_lynx.stock.recompute import recompute_module
from megatron_lynx.stock.setting import StockSetting


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
    return Treatment(section, frozenset(again), frozenset(discarded), tuple(groups))
