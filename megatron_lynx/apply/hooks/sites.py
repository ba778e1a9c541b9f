"""The submodule calls of a layer.

Replaces              `forward` on the submodule *instances* that are sites (`self_attention.linear_qkv`, `mlp.linear_fc1`, ...);
                      with experts also the token dispatcher's methods for dispatch and combine.
Why                   the recorder drops the saved tensors of a recomputed site; a recomputation returns a kept site's memo
                      without running it; and work may begin where backward reaches a site.
Calls the original    once per call, unless a recomputation has the result.
Holds                 nothing.
Passes through when   the call is outside of a half that is recorded or recomputed. Halves without work have no hooks.
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
    """`met`: halves with items that are recomputed or offloaded, or with work that begins inside. `te`: the layer is Transformer
    Engine's. `fp8`: its linears may run in FP8.
    """
    for section in sections_in(layer):
        if section.half not in met:
            continue
        for place in places_of(section, layer, te=te):
            site = _site_at(place, section, te=te, fp8=fp8)
            yield Claim(
                place.owner, place.method, _as_site(engine, site), "is a site of the plan", f"layer {number}.{place.item.name}"
            )


def _site_at(place: Place, section: Section, *, te: bool, fp8: bool) -> Callable[..., Site]:
    """Makes the site from its code."""
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
    """The norm that Transformer Engine computes inside a site's linear, or ""."""
    if item.role == "column_parallel" and section.fuses_norm:
        return section.norm
    return item.norm_inside if hasattr(module, "layer_norm_weight") else ""


def _as_site(engine: Engine, site_of: Callable[..., Site]) -> Callable[[Any], Any]:
    def hooked(original: Any) -> Any:
        return engine.reported(site_of(forward=original))

    return hooked
