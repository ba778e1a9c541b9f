"""Layers of a hybrid stack: Megatron's HybridModel has the attention and the MLP of a GPT layer as two layers of its own.

    GPTModel       layer 1: _forward_attention, _forward_mlp                      layer 2: ...
    HybridModel    layer 1: _forward_attention   layer 2: _forward_mlp            layer 3: ...      (pattern *-*-)
                            its MLP passes through        its attention passes through
                   └────────────── one layer of a plan: 1 ──────────────┘

A plan's layers are those of the GPT that the hybrid model translates, so that both get the same plan. A stack with anything else
(Mamba, experts, an attention without an MLP behind it) is refused.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch.nn import Module

from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.errors import Problem

STACK = "HybridStack"
"""The class of a hybrid model's decoder."""
PAIR = "*-"
"""An attention and an MLP, in a pattern of layers."""
CLASSES: dict[Half, str] = dict(
    zip(
        HALVES,
        ("megatron.core.transformer.transformer_layer.TransformerLayer", "megatron.core.ssm.mlp_layer.MLPLayer"),
        strict=True,
    )
)
"""Of the two layers, where Megatron's own specification of a stack is taken."""


class HybridLayer:
    """Two layers of a hybrid stack that are one layer of a plan: as much of Megatron's layer as hooks look at."""

    def __init__(self, number: int, attention: Module, mlp: Module) -> None:
        self.layer_number = number
        self.owners: dict[Half, Module] = dict(zip(HALVES, (attention, mlp), strict=True))

    def __getattr__(self, name: str) -> Any:
        """An attribute of the layer that has that half: names of the second half's have its name in them."""
        first, second = HALVES
        return getattr(self.owners[second if second in name else first], name)


def owner_of(layer: Any, half: Half, path: str = "") -> Module:
    """The module whose method a half is. `path`: where it is in the layer, if that is none of the layer's own."""
    owner: Module = layer.owners[half] if isinstance(layer, HybridLayer) else layer
    return attrgetter(path)(owner) if path else owner


def is_hybrid(chunk: Module) -> bool:
    return type(getattr(chunk, "decoder", None)).__name__ == STACK


def layers_in(chunk: Module) -> list[Any]:
    """The layers of a plan in one chunk, in order: Megatron's own, or pairs of a hybrid stack."""
    layers = list(chunk.decoder.layers)  # type: ignore[union-attr, arg-type]
    if not is_hybrid(chunk):
        return layers
    return [HybridLayer((mlp.layer_number + 1) // 2, attention, mlp) for attention, mlp in zip(*[iter(layers)] * 2, strict=False)]


def refused_stack(chunk: Module) -> Problem | None:
    """Why a hybrid stack is no translation of a GPT; None where it is one."""
    if not is_hybrid(chunk):
        return None
    pattern = "".join(chunk.decoder.layer_type_list)  # type: ignore[union-attr, arg-type]
    if pattern.replace(PAIR, "") == "":
        return None
    found, needed = f"{pattern} on this rank", "pairs of an attention and an MLP, such as *-*-"
    todo = "Mamba layers, experts and halves without the other one are not planned in hybrid models yet"
    return Problem("--hybrid-layer-pattern", found, needed, todo)
