"""Sections of a Mamba-2 layer of a hybrid stack (`M` in `--hybrid-layer-pattern`), and of a gated delta net (Qwen3-Next's linear
attention, `--experimental-attention-variant gated_delta_net`).

    input_layernorm ─> mamba_in_proj ─(mamba_scan)─> mamba_norm ─> mamba_out_proj ─> attention_bda
    input_layernorm ─> delta_in_proj ─(delta_convolution)─> delta_rule ─> delta_norm ─> delta_out_proj ─> attention_bda
                                              └────────────── gate ──────────┘

`mamba_scan` is the code between two sites: one fused kernel for convolution, scan and gate (`MambaMixer._ssm_training`).
`delta_convolution` is code, too: the convolution with its activation, the norm of queries and keys, their repetition for each
value head, decay and step. `delta_rule` is the scan, an attribute of the module since 0.18; `delta_norm` is the norm of its
result and the product with the gate (`GatedDeltaNet._apply_gated_norm`). Tensor-parallel collectives are the
usual attention's.

    mamba: {heads: 64, size: 64, groups: 8, state: 128}                                            Nemotron 3 Nano
    delta: {key_heads: 16, key_size: 128, value_heads: 32, value_size: 128, convolved: 4}          Qwen3-Next 80B
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from megatron_lynx.kinds.dense.section import ATTENTION, COLLECTIVES
from megatron_lynx.kinds.section import Item, Section
from megatron_lynx.validation import Part

MAMBA = Section(
    "mamba",
    ATTENTION.half,
    "forward",
    (
        Item(ATTENTION.norm, "norm", path="norm"),
        Item("mamba_in_proj", "column_parallel", path="mixer.in_proj"),
        Item("mamba_scan", "code"),
        Item("mamba_norm", "kernel", path="mixer.norm"),
        Item("mamba_out_proj", "row_parallel", path="mixer.out_proj"),
        ATTENTION.items[-1],
    ),
    COLLECTIVES,
    in_some_layers=True,
)
MAMBA_IN_PROJ, SCAN, MAMBA_NORM, MAMBA_OUT_PROJ = MAMBA.names[1:-1]


class MambaSizes(Part):
    """Sizes of a Mamba-2 layer, over all tensor-parallel ranks. Each field names its flag."""

    heads: int = Field(ge=1)
    """`--mamba-num-heads`."""
    size: int = Field(ge=1)
    """Width of a head (`--mamba-head-dim`)."""
    groups: int = Field(ge=1)
    """Groups of heads that share a state's input and output (`--mamba-num-groups`)."""
    state: int = Field(ge=1)
    """Entries of a state (`--mamba-state-dim`)."""

    @property
    def inner(self) -> int:
        """Columns of the scan's result, and of its gate."""
        return self.heads * self.size

    @property
    def convolved(self) -> int:
        """Columns that are convolved: values, and the states' inputs and outputs."""
        return self.inner + 2 * self.groups * self.state

    @property
    def made(self) -> int:
        """Output columns of the first linear: gate, convolved columns, and a step for each head."""
        return self.inner + self.convolved + self.heads

    @property
    def result(self) -> int:
        return self.inner

    @property
    def shared(self) -> Mapping[str, int]:
        """Counts that tensor-parallel ranks divide among them."""
        return {"heads": self.heads, "groups": self.groups}


DELTA_NET = Section(
    "gated_delta_net",
    ATTENTION.half,
    ATTENTION.method,
    (
        ATTENTION.items[0],
        Item("delta_in_proj", "column_parallel", path="self_attention.in_proj"),
        Item("delta_convolution", "code"),
        Item("delta_rule", "kernel", path="self_attention", methods=("gated_delta_rule",)),
        Item("delta_norm", "kernel", path="self_attention", methods=("_apply_gated_norm",)),
        Item("delta_out_proj", "row_parallel", path="self_attention.out_proj"),
        ATTENTION.items[-1],
    ),
    COLLECTIVES,
    in_some_layers=True,
)
IN_PROJ, CONVOLUTION, RULE, GATED_NORM, OUT_PROJ = DELTA_NET.names[1:-1]


class DeltaSizes(Part):
    """Sizes of a gated delta net, over all tensor-parallel ranks. Each field names its flag."""

    key_heads: int = Field(ge=1)
    """`--linear-num-key-heads`."""
    key_size: int = Field(ge=1)
    """`--linear-key-head-dim`."""
    value_heads: int = Field(ge=1)
    """`--linear-num-value-heads`: queries and keys are repeated if there are more of them than key heads."""
    value_size: int = Field(ge=1)
    """`--linear-value-head-dim`."""
    convolved: int = Field(ge=1)
    """Width of the convolution in tokens (`--linear-conv-kernel-dim`)."""

    @property
    def keys(self) -> int:
        """Columns of all keys, and of all queries."""
        return self.key_heads * self.key_size

    @property
    def repeated(self) -> int:
        """Columns of keys after they are repeated for each value head."""
        return self.value_heads * self.key_size

    @property
    def values(self) -> int:
        return self.value_heads * self.value_size

    @property
    def made(self) -> int:
        """Output columns of the first linear: queries, keys, values, gate, step and decay."""
        return 2 * (self.keys + self.values + self.value_heads)

    @property
    def result(self) -> int:
        return self.values

    @property
    def shared(self) -> Mapping[str, int]:
        """Counts that tensor-parallel ranks divide among them."""
        return {"key_heads": self.key_heads, "value_heads": self.value_heads}
