"""The submodule calls of a layer.

Replaces              `forward` on the submodule *instances* that are sites (`self_attention.linear_qkv`, `mlp.linear_fc1`, ...);
                      with experts also those methods of the token dispatcher that bring tokens to experts, and back.
Why                   the recorder lets go of what a replayed site saves, and a replay returns a kept site's memo without
                      running it; and something may begin where backward comes to a site.
Calls the original    once per call, unless a replay has its result.
Holds                 nothing.
Passes through when   the call is not made inside a half that is recorded or replayed. Halves of which nothing ever is have no
                      hooks on their sites.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

from torch.nn import Module

from megatron_lynx.anatomy import Half, Item, Section
from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.kinds import sections_in
from megatron_lynx.apply.site import Place, places_of
from megatron_lynx.apply.transformer_engine.fp8 import Fp8Linear
from megatron_lynx.apply.transformer_engine.norm import norm_inside
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.site import Site


def claims(
    engine: Engine,
    layer: Module,
    number: int,
    met: Container[Half],
    *,
    te: bool = False,
    fp8: bool = False,
) -> Iterator[Claim]:
    """`met`: halves of which anything is replayed or offloaded, or in whose midst anything begins. `te`: the layer is made of
    Transformer Engine's modules. `fp8`: its linears may run in FP8."""
    for section in sections_in(layer):
        if section.half not in met:
            continue
        for place in places_of(section, layer, te=te):
            site = _site_at(place, section, te=te, fp8=fp8)
            yield Claim(
                place.owner, place.method, _as_site(engine, site), "is a site of the plan", f"layer {number}.{place.item.name}"
            )


def _site_at(place: Place, section: Section, *, te: bool, fp8: bool) -> Callable[..., Site]:
    """What makes the site at a place of its own code."""
    item, module = place.item, place.module
    norm = norm_of(section, item, place.owner) if te else ""
    return partial(
        Site,
        item.name,
        module,
        first=norm_inside(place.owner, norm) if norm else None,
        state=Fp8Linear(place.owner) if fp8 and (item.is_linear or item.of_experts) else None,
        may_draw=item.may_draw,
        goes_on=place.goes_on,
    )


def norm_of(section: Section, item: Item, module: Module) -> str:
    """The norm that Transformer Engine makes inside a site's linear; empty where it makes none."""
    if item.role == "column_parallel" and section.fuses_norm:
        return section.norm
    return item.norm_inside if hasattr(module, "layer_norm_weight") else ""


def _as_site(engine: Engine, site_of: Callable[..., Site]) -> Callable[[Any], Any]:
    def hooked(original: Any) -> Any:
        return engine.reported(site_of(forward=original))

    return hooked
