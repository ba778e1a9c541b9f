"""Patterns of hybrid stacks, in which Megatron's HybridModel has an attention, an MLP, experts or a Mamba layer as a layer each,
and their layers in a plan.

    M-M*-|M*E/*E     a symbol is a layer of Megatron's, a bar ends a stage, or a chunk of one; a slash begins a part for
                     multi-token prediction, one for each depth

    *-   *E          an attention and the MLP or experts after it: one layer of a plan, as in a GPT
    M-   GE          the same with a Mamba layer, or a gated delta net, in place of the attention
    M    *           one layer without a second half
    -    E           one layer without a first half

So a stack of pairs of an attention and an MLP has the layers of the equivalent GPT.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from megatron_lynx.kinds.opaque.section import NOTHING, OpaqueName

BAR, SLASH, ATTENTION, EXPERTS, MAMBA, DELTA_NET = "|", "/", "*", "E", "M", "G"
KNOWN = f"{ATTENTION}{MAMBA}{DELTA_NET}-{EXPERTS}"
LAYER = re.compile(rf"([{re.escape(ATTENTION + MAMBA + DELTA_NET)}]?)([-{EXPERTS}]?)")
NEEDED = "attention (*), MLP (-), experts (E), Mamba (M) and gated delta nets (G), with bars between stages"
OPAQUE: dict[str, OpaqueName] = {MAMBA: "mamba", DELTA_NET: "gated_delta_net"}


class StackLayer(NamedTuple):
    """One layer of a plan, by the symbols of its halves; empty for a missing half."""

    first: str
    second: str

    @property
    def symbols(self) -> str:
        return self.first + self.second

    @property
    def opaque(self) -> tuple[OpaqueName, ...]:
        first = OPAQUE.get(self.first) if self.first else NOTHING[0]
        return tuple(name for name in (first, None if self.second else NOTHING[1]) if name is not None)


def unknown_in(pattern: str) -> str:
    return "".join(dict.fromkeys(symbol for symbol in pattern if symbol not in KNOWN + BAR + SLASH))


def parts_of(pattern: str) -> tuple[str, tuple[str, ...]]:
    decoder, *predicting = pattern.split(SLASH)
    return decoder, tuple(filter(None, predicting))


def segments_of(pattern: str, stages: int) -> list[str]:
    """The segments of stages, or chunks: between bars, or without bars of equal size. Empty if the pattern does not divide."""
    if BAR in pattern or stages == 1:
        return pattern.split(BAR)
    size, rest = divmod(len(pattern), stages)
    return [] if rest else [pattern[at : at + size] for at in range(0, len(pattern), size)]


def layers_of(segment: str) -> list[StackLayer]:
    return [StackLayer(*match.groups()) for match in LAYER.finditer(segment) if match[0]]


def pattern_of(layers: Sequence[StackLayer], counts: Iterable[int], predicting: Sequence[str] = ()) -> str:
    """The pattern of these layers, with `counts` of them in the segments, and of parts for multi-token prediction."""
    symbols = (layer.symbols for layer in layers)
    return SLASH.join([BAR.join("".join(islice(symbols, count)) for count in counts), *predicting])
