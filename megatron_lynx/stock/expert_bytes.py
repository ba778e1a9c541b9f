"""What the half of a layer with experts holds under a stock setting.

input   norm   router   experts: rows on arrival, first GEMM's output, activation's output   shared   dropout
        layernorm       moe_act: all behind the first GEMM's output                          shared_experts
               └───────────────────────── moe ─────────────────────────────────────────────────┘
mlp_norm                expert_fc1       moe_act                                   (offloaded)
"""

from __future__ import annotations

from megatron_lynx.profiler.expert_tensors import expert_width, routed_rows, saved_parts
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock.held import HalfBytes
from megatron_lynx.stock.offload import offload_module
from megatron_lynx.stock.recompute import recompute_module
from megatron_lynx.stock.setting import StockSetting


def expert_half_bytes(shape: LayerShape, setting: StockSetting, least_bytes: int) -> HalfBytes:
    """`least_bytes`: of the smallest tensor that is offloaded."""
    parts = _parts(shape)
    again = {part for name in setting.recompute for part in recompute_module(name).expert_parts}
    asked = {part for name in setting.offload for part in offload_module(name).expert_parts}
    if "experts" in again:
        again |= set(_inside_experts(shape))
    away = [part for part in sorted(asked - again) if parts[part] >= least_bytes]
    leaves = sum(parts[part] for part in away)
    made_again = sum(parts[part] for part in parts if part in again)
    return HalfBytes(sum(parts.values()) - made_again - leaves, made_again, leaves, leaves, 0)


def _parts(shape: LayerShape) -> dict[str, int]:
    """The half's parts, the experts' in three and a rest."""
    parts, inside = saved_parts(shape), _inside_experts(shape)
    return {**parts, "experts": parts["experts"] - sum(inside.values()), **inside}


def _inside_experts(shape: LayerShape) -> dict[str, int]:
    """What one GEMM or the other keeps of the experts' rows. Behind the first GEMM's output, everything is the activation's."""
    element_rows = routed_rows(shape) * shape.model.element_bytes
    gated = shape.model.activation == "swiglu"
    width = expert_width(shape)
    made = element_rows * width * (2 if gated else 1)
    behind = element_rows * width * ((4 if shape.eager else 1) if gated else 2)
    return {"expert rows": element_rows * shape.model.hidden, "fc1 output": made, "behind fc1": behind}
