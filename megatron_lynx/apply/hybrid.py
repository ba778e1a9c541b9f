"""Layers of a hybrid stack: Megatron's HybridModel has the attention and the MLP of a GPT layer as two layers of its own.

    GPTModel       layer 1: _forward_attention, _forward_mlp                      layer 2: ...
    HybridModel    layer 1: _forward_attention   layer 2: _forward_mlp            layer 3: ...      (pattern *-*-)
                            its MLP passes through        its attention passes through
                   └────────────── one layer of a plan: 1 ──────────────┘

What is one layer of a plan in any pattern, `anatomy.stack` says. A Mamba layer is a half that nobody looks into, and a half may
not be there at all (`kinds.opaque`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from torch.nn import Module

from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.anatomy.stack import NEEDED, StackLayer, layers_of, segments_of, unknown_in
from megatron_lynx.errors import Problem

STACK = "HybridStack"
"""The class of a hybrid model's decoder."""
_TRANSFORMER = "megatron.core.transformer.transformer_layer."
CLASSES: Mapping[Half, tuple[str, ...]] = dict(
    zip(
        HALVES,
        ((f"{_TRANSFORMER}TransformerLayer",), ("megatron.core.ssm.mlp_layer.MLPLayer", f"{_TRANSFORMER}MoETransformerLayer")),
        strict=True,
    )
)
"""Of the layers of each half, where Megatron's own specification of a stack is taken."""


class HybridLayer:
    """One or two layers of a hybrid stack that are one layer of a plan: as much of Megatron's layer as hooks look at."""

    def __init__(self, number: int, owners: Mapping[Half, Module]) -> None:
        self.layer_number = number
        self.owners = owners
        """By half; one that is not there has none."""

    def __getattr__(self, name: str) -> Any:
        """An attribute of the layer that has that half: names of the second half's have its name in them."""
        first, second = HALVES
        asked = second if second in name else first
        return getattr(self.owners.get(asked) or next(iter(self.owners.values())), name)

    def modules(self) -> Iterator[Module]:
        for owner in self.owners.values():
            yield from owner.modules()


def owner_of(layer: Any, half: Half, path: str = "") -> Module:
    """The module whose method a half is. `path`: where it is in the layer, if that is none of the layer's own."""
    owner: Module = layer.owners[half] if isinstance(layer, HybridLayer) else layer
    return attrgetter(path)(owner) if path else owner


def is_hybrid(chunk: Module) -> bool:
    return type(getattr(chunk, "decoder", None)).__name__ == STACK


def layers_in(chunk: Module) -> list[Any]:
    """The layers of a plan in one chunk, in order: Megatron's own, or those that a hybrid stack has."""
    layers = list(chunk.decoder.layers)  # type: ignore[union-attr, arg-type]
    if not is_hybrid(chunk) or not layers:
        return layers
    own, below = layers_of(_symbols(chunk)), layers[0].layer_number - 1
    first, found = 1 + sum(len(each) for each in _segments_below(chunk, below)), iter(layers)
    return [HybridLayer(number, _owners(layer, found)) for number, layer in enumerate(own, start=first)]


def all_layers(chunk: Module) -> int:
    """How many layers of a plan the whole model has of which a hybrid chunk is a part."""
    return sum(map(len, map(layers_of, _segments(chunk))))


def _owners(layer: StackLayer, found: Iterator[Module]) -> dict[Half, Module]:
    return {half: next(found) for half, symbol in zip(HALVES, layer, strict=True) if symbol}


def _symbols(chunk: Module) -> str:
    return "".join(chunk.decoder.layer_type_list)  # type: ignore[union-attr, arg-type]


def _segments(chunk: Any) -> list[str]:
    """What every stage, or chunk of one, has. Without bars all have as much, as Megatron cuts them."""
    pattern, own = str(chunk.hybrid_layer_pattern), len(_symbols(chunk))
    return segments_of(pattern, max(1, len(pattern) // max(1, own)))


def _segments_below(chunk: Module, symbols: int) -> Iterator[list[StackLayer]]:
    """The layers of the segments that have the first so many symbols."""
    for segment in _segments(chunk):
        if symbols <= 0:
            return
        symbols -= len(segment)
        yield layers_of(segment)


def refused_stack(chunk: Module) -> Problem | None:
    """Why nothing in a hybrid stack is known; None where a plan can have it."""
    if not is_hybrid(chunk) or not (unknown := unknown_in(_symbols(chunk))):
        return None
    found, todo = f"{unknown} in {_symbols(chunk)} on this rank", "other layers are not planned in hybrid models yet"
    return Problem("--hybrid-layer-pattern", found, NEEDED, todo)
