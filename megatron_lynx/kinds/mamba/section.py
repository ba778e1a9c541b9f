"""Section of a Mamba-2 layer of a hybrid stack (`M` in `--hybrid-layer-pattern`).

    input_layernorm ─> mamba_in_proj ─(mamba_scan)─> mamba_norm ─> mamba_out_proj ─> attention_bda

`mamba_scan` is the code between two sites: one fused kernel for convolution, scan and gate (`MambaMixer._ssm_training`).
Tensor-parallel collectives are those of the usual attention.

    mamba: {heads: 64, size: 64, groups: 8, state: 128}                                            Nemotron 3 Nano
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
IN_PROJ, SCAN, GATED_NORM, OUT_PROJ = MAMBA.names[1:-1]


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
        """Input columns of the last linear."""
        return self.inner

    @property
    def shared(self) -> Mapping[str, int]:
        """Counts that tensor-parallel ranks divide among them."""
        return {"heads": self.heads, "groups": self.groups}
