"""Attention whose core's result is multiplied with a gate, which a linear of its own makes of what the norm made.

    input_layernorm ─┬─> linear_gate ──────────────────────────────────────────┐
                     └─> linear_qkv ─(rotary)─> core_attention ──(gating)──────┴─> linear_proj ─> attention_bda

Two paths lead from the norm to the code `gating`. Both linears are cut by columns, so the gradient of what they read is reduced
for each; sequence parallelism is refused.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lynx.anatomy import ATTENTION, Collective, Item, Section
from megatron_lynx.kinds.sections import Facts

NORM, QKV, CODE, CORE, PROJECTION, RESIDUAL = ATTENTION.items
GATE = Item("linear_gate", "query_projection", path="self_attention.linear_gate")
GATING = Item("gating", "code")

GATED = Section(
    "gated",
    ATTENTION.half,
    ATTENTION.method,
    (NORM, GATE, QKV, CODE, replace(CORE, path=f"{CORE.path}.inner"), GATING, PROJECTION, RESIDUAL),
    {
        ("fwd", False): (Collective("all_reduce", "output", PROJECTION.name),),
        ("bwd", False): tuple(
            Collective("all_reduce", "input_gradient", linear.name, beside="wgrad", of=linear.name) for linear in (QKV, GATE)
        ),
    },
    fuses_norm=False,
    two_paths=True,
)


def chosen(facts: Facts) -> Section | None:
    return GATED if GATED.name in facts.kinds else None
