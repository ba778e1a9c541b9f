"""Sections of a dense transformer layer (Megatron since 0.12).

    attention    input_layernorm ─> linear_qkv ─> rotary ─> core_attention ─> linear_proj ─> attention_bda
    mlp          pre_mlp_layernorm ─> linear_fc1 ─> activation ─> linear_fc2 ─> mlp_bda

    tensor parallelism alone       fwd.0  all-reduce of the output          bwd.0  all-reduce of the input's gradient
    with sequence parallelism      fwd.0  all-gather of the input           bwd.0  all-gather of the output's gradient
                                   fwd.1  reduce-scatter of the output      bwd.1  all-gather of the input, overlapped with dgrad
                                                                            bwd.2  reduce-scatter of its gradient, with wgrad

`rotary` is the code between linear_qkv and core_attention: splitting Q, K and V, their norms, the rotary embedding. Transformer
Engine fuses a norm into the next linear; the layer has an identity in its place.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_lynx.kinds.section import Collective, Half, Item, Pass, Section

COLLECTIVES: Mapping[tuple[Pass, bool], tuple[Collective, ...]] = {
    ("fwd", False): (Collective("all_reduce", "output", "row_parallel"),),
    ("bwd", False): (Collective("all_reduce", "input_gradient", "column_parallel", beside="wgrad"),),
    ("fwd", True): (Collective("all_gather", "input", "norm"), Collective("reduce_scatter", "output", "row_parallel")),
    ("bwd", True): (
        Collective("all_gather", "gradient", "residual"),
        Collective("all_gather", "input", "column_parallel", beside="dgrad"),
        Collective("reduce_scatter", "input_gradient", "column_parallel", beside="wgrad"),
    ),
}
"""Collectives of a column-parallel linear followed by a row-parallel one."""

ATTENTION = Section(
    name="attention",
    half="attention",
    method="_forward_attention",
    items=(
        Item("input_layernorm", "norm", path="input_layernorm"),
        Item("linear_qkv", "column_parallel", path="self_attention.linear_qkv"),
        Item("rotary", "code"),
        Item("core_attention", "core", path="self_attention.core_attention"),
        Item("linear_proj", "row_parallel", path="self_attention.linear_proj"),
        Item("attention_bda", "residual"),
    ),
    collectives_of=COLLECTIVES,
)

MLP = Section(
    name="mlp",
    half="mlp",
    method="_forward_mlp",
    items=(
        Item("pre_mlp_layernorm", "norm", path="pre_mlp_layernorm"),
        Item("linear_fc1", "column_parallel", path="mlp.linear_fc1"),
        Item("activation", "code"),
        Item("linear_fc2", "row_parallel", path="mlp.linear_fc2"),
        Item("mlp_bda", "residual"),
    ),
    collectives_of=COLLECTIVES,
)

LINEAR_QKV, ROTARY, CORE_ATTENTION, LINEAR_PROJ = ATTENTION.names[1:5]
LINEAR_FC1, ACTIVATION, LINEAR_FC2 = MLP.names[1:4]

DENSE: Mapping[Half, Section] = {"attention": ATTENTION, "mlp": MLP}

ITEMS: tuple[str, ...] = ATTENTION.names + MLP.names
RECOMPUTABLE: tuple[str, ...] = ATTENTION.recomputable + MLP.recomputable

COLUMN_PARALLEL = tuple(section.column_parallel for section in DENSE.values())
ROW_PARALLEL = tuple(section.row_parallel for section in DENSE.values())
LINEARS = tuple(linear for section in DENSE.values() for linear in section.linears)
CODE_ITEMS = frozenset(item.name for section in DENSE.values() for item in section.items if not item.is_site)
