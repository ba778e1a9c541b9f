"""Whether a half may draw random numbers: whether anything in it drops out, now.

Norms, linears and activations draw nothing. The core attention does where its dropout is not 0, and so does the addition at the
end of a half. Both are read when a half is called, because training code may change them. A router may draw, too, but no replay
runs it: where nothing drops out behind it, nobody needs to know.

Transformer Engine's fused attention takes a seed and an offset from the generator, moves it on, and saves both for its backward,
whether anything drops out or not (`fused_attn_fwd` in its csrc/extensions/attention.cpp; seen on an H100). Where a replay runs
it, the half counts as one that draws: the replay finds the generator where forward had it, and leaves it where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from torch.nn import Dropout, Module

from megatron_lynx.anatomy import Section
from megatron_lynx.apply.site import places_of


def may_draw_in(section: Section, layer: Module, replayed: Container[str]) -> Callable[[], bool]:
    """For calls of this half of this layer, of which these items are replayed."""
    cores = [place for place in places_of(section, layer) if place.item.role == "core"]
    if any(place.item.name in replayed and hasattr(place.owner, "fused_attention") for place in cores):
        return lambda: True
    inside = [module for place in cores if place.module is not None for module in place.module.modules()]
    dropping = [module for module in inside if isinstance(module, Dropout)]
    attending = [module for module in inside if hasattr(module, "attention_dropout")]

    def may_draw() -> bool:
        if getattr(layer, "hidden_dropout", 1.0):
            return True
        return any(each.p for each in dropping) or any(_drops(each.attention_dropout) for each in attending)

    return may_draw


def _drops(dropout: Any) -> bool:
    """Megatron has a module there, and Transformer Engine a module or a probability."""
    return bool(getattr(dropout, "p", dropout))
