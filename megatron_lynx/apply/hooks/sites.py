"""The sites of a layer: the submodule calls for the items of `megatron_lynx.kinds`.

Replaces              `forward` on the submodule *instances*; with experts also the token dispatcher's methods for dispatch and
                      combine. Experts that run one by one call a site once each.
Why                   the recorder drops the saved tensors of a recomputed site; a recomputation returns a kept site's memo
                      without running it; and work may begin where backward reaches a site.
Calls the original    once per call, unless a recomputation has the result.
Holds                 nothing.
Passes through when   the call is outside of a half that is recorded or recomputed. Halves without work have no hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from torch.nn import Dropout, Module

from megatron_lynx.anatomy import Item, Section
from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.live_run import linear_in
from megatron_lynx.apply.transformer_engine import Fp8Linear, norm_inside
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.site import Site

EACH = "*"
ONE_BY_ONE = "local_experts"
"""The attribute of Megatron's SequentialMLP that has its experts."""


class Place(NamedTuple):
    item: Item
    owner: Any
    method: str

    @property
    def module(self) -> Module | None:
        """The module that is called; other methods of a module run like the code around them."""
        return self.owner if isinstance(self.owner, Module) and self.method == "forward" else None


def places_of(section: Section, layer: Module, *, te: bool = False) -> list[Place]:
    """The sites of a section in the order of a forward. `te`: Transformer Engine's layer, with norms inside linears. Raises
    `AttributeError` if the layer lacks one."""
    items = [item for item in section.sites if not (te and item.name in section.norms_inside)]
    return [Place(item, owner, method) for item in items for owner in _owners(item, layer) for method in item.methods]


def modules_named(section: Section, layer: Module, names: Container[str]) -> Iterator[tuple[Item, int | None, Module]]:
    """The submodules of chosen items in the order of a forward, numbered if an item has several."""
    for item in section.sites:
        owners = list(_owners(item, layer)) if item.name in names else []
        yield from ((item, number if owners[1:] else None, owner) for number, owner in enumerate(owners))


def _owners(item: Item, layer: Module) -> Iterator[Any]:
    before, separator, behind = item.path.partition(f".{EACH}.")
    owner = attrgetter(before)(layer)
    if not separator:
        yield owner
        return
    for expert in getattr(owner, ONE_BY_ONE, (owner,)):
        yield attrgetter(behind)(expert)


def marked_in(section: Section, layer: Module) -> tuple[object, ...]:
    """The sites of a half that are not modules. They pass state from method to method as attributes, their own or those of a
    delegate (a flex dispatcher's manager)."""
    owners = {id(place.owner): place.owner for place in places_of(section, layer) if not isinstance(place.owner, Module)}
    inner = (
        held
        for owner in owners.values()
        for held in vars(owner).values()
        if type(held).__module__ == type(owner).__module__ and hasattr(held, "__dict__")
    )
    return (*owners.values(), *inner)


def may_draw_in(section: Section, layer: Module, recomputed: Container[str]) -> Callable[[], bool]:
    """Whether a call of this half draws random numbers. `recomputed`: the items that are recomputed.

    Dropouts are read at each call, because training code may change them. A router may draw, too, but it is never recomputed.
    Transformer Engine's fused attention takes a seed and an offset from the generator, advances it, and saves both for its
    backward, with or without dropout (`fused_attn_fwd` in its csrc/extensions/attention.cpp).
    """
    places = places_of(section, layer)
    cores = [place for place in places if place.item.role == "core"]
    if any(place.item.name in recomputed and hasattr(place.owner, "fused_attention") for place in cores):
        return lambda: True
    inside = [module for place in places if place.module is not None for module in place.module.modules()]
    dropping = [module for module in inside if isinstance(module, Dropout)]
    attending = [module for module in inside if hasattr(module, "attention_dropout")]

    def may_draw() -> bool:
        if getattr(layer, "hidden_dropout", 1.0):
            return True
        dropouts = (*dropping, *(module.attention_dropout for module in attending))
        return any(getattr(dropout, "p", dropout) for dropout in dropouts)  # a module, or in Transformer Engine a probability

    return may_draw


def claims(engine: Engine, layer: Module, section: Section, number: int, *, te: bool, fp8: bool) -> Iterator[Claim]:
    """`section`: has items that are recomputed or offloaded, or work that begins inside. `te`: the layer is Transformer Engine's.
    `fp8`: its linears may run in FP8."""
    for place in places_of(section, layer, te=te):
        site = _site_at(place, section, te=te, fp8=fp8)

        def hooked(original: Any, site: Callable[..., Site] = site) -> Any:
            return engine.reported(site(forward=original))

        yield Claim(place.owner, place.method, hooked, "is a site of the plan", f"layer {number}.{place.item.name}")


def _site_at(place: Place, section: Section, *, te: bool, fp8: bool) -> Callable[..., Site]:
    item, owner, method = place
    norm, linear = "", linear_in(owner)
    if te and item.role == "column_parallel" and section.fuses_norm:
        norm = section.norm
    elif te and hasattr(linear, "layer_norm_weight"):
        norm = item.norm_inside
    return partial(
        Site,
        item.name,
        place.module,
        first=norm_inside(linear, norm) if norm else None,
        state=Fp8Linear(owner) if fp8 and (item.is_linear or item.of_experts) else None,
        may_draw=item.may_draw or linear is not owner,  # an adapter may have dropout
        has_next_method=method != item.methods[-1],
    )
