"""What a plan decides about, in the order in which a layer runs it.

    attention half:  input_layernorm  linear_qkv  rotary  core_attention  linear_proj  attention_bda
    MLP half:        pre_mlp_layernorm  linear_fc1  activation  linear_fc2  mlp_bda

*Sites* are submodule calls of Megatron's layer. The other items are the code between two sites, and are decided about
because that code saves tensors too: `rotary` lies between linear_qkv and core_attention (splitting Q, K and V, and the
rotary embedding), `activation` between linear_fc1 and linear_fc2, the two `bda` (bias, dropout, residual add) at the end
of their half.
"""

from __future__ import annotations

from typing import Literal

Half = Literal["attention", "mlp"]
HALVES: tuple[Half, Half] = ("attention", "mlp")

ITEMS_OF: dict[Half, tuple[str, ...]] = {
    "attention": ("input_layernorm", "linear_qkv", "rotary", "core_attention", "linear_proj", "attention_bda"),
    "mlp": ("pre_mlp_layernorm", "linear_fc1", "activation", "linear_fc2", "mlp_bda"),
}
ITEMS: tuple[str, ...] = ITEMS_OF["attention"] + ITEMS_OF["mlp"]

CODE_ITEMS = ("rotary", "activation", "attention_bda", "mlp_bda")
"""The items that are no submodule."""

ROW_PARALLEL = ("linear_proj", "linear_fc2")
"""Always kept: their input is captured when a replay reaches them, so their GEMM and their reduction never run again."""

COLUMN_PARALLEL: dict[Half, str] = {"attention": "linear_qkv", "mlp": "linear_fc1"}
"""The site of each half whose input is gathered under sequence parallelism."""
