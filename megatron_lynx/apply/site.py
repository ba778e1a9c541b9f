"""Where the sites of a live layer are: the submodules that Megatron built for the items of `megatron_lynx.kinds`.

    _forward_attention   input_layernorm ─> self_attention.linear_qkv ─(rotary)─> .core_attention ─> .linear_proj ─(bda)─>
                         (or latent attention's: `kinds.latent`)
    _forward_mlp         pre_mlp_layernorm ─> mlp.linear_fc1 ─(activation)─> .linear_fc2 ─(bda)─>
       with experts      pre_mlp_layernorm ─> mlp.router ─> mlp.token_dispatcher ─> mlp.experts ─> mlp.token_dispatcher ─(bda)─>

The names have been stable from megatron-core 0.12 to 0.20. A site of experts is called once for each expert where they run one
by one, and the dispatcher's are methods of an object that is no module.

Whether a half may draw random numbers: whether anything in it drops out, now.

Norms, linears and activations draw nothing. The core attention does where its dropout is not 0, and so does the addition at the
end of a half. Both are read when a half is called, because training code may change them. A router may draw, too, but no replay
runs it: where nothing drops out behind it, nobody needs to know.

Transformer Engine's fused attention takes a seed and an offset from the generator, moves it on, and saves both for its backward,
whether anything drops out or not (`fused_attn_fwd` in its csrc/extensions/attention.cpp; seen on an H100). Where a replay runs
it, the half counts as one that draws: the replay finds the generator where forward had it, and leaves it where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from torch.nn import Dropout, Module

from megatron_lynx.anatomy import Item, Section

EACH = "*"
ONE_BY_ONE = "local_experts"
"""Where Megatron's SequentialMLP has its experts."""


class Place(NamedTuple):
    """One method that is a site, or a part of one."""

    item: Item
    owner: Any
    method: str

    @property
    def module(self) -> Module | None:
        return self.owner if isinstance(self.owner, Module) else None

    @property
    def goes_on(self) -> bool:
        """Whether another method of the same item is called behind it."""
        return self.method != self.item.methods[-1]


def places_of(section: Section, layer: Module, *, te: bool = False) -> list[Place]:
    """The sites of a section in the order of a forward. `te`: the layer is Transformer Engine's, with norms inside linears.

    Raises `AttributeError` where the layer has none of that name.
    """
    inside = {"inner_norm", *(("norm",) if section.fuses_norm else ())} if te else set()
    items = [item for item in section.sites if item.role not in inside]
    return [Place(item, owner, method) for item in items for owner in _owners(item, layer) for method in item.methods]


def modules_of(section: Section, layer: Module, *, te: bool = False) -> dict[Item, Module]:
    """The submodules of a layer by item, for a section whose items are one submodule each."""
    return {place.item: place.owner for place in places_of(section, layer, te=te)}


def modules_named(section: Section, layer: Module, names: Container[str]) -> Iterator[tuple[Item, int | None, Module]]:
    """The submodules of chosen items in the order of a forward, numbered where an item has several."""
    for item in section.sites:
        owners = list(_owners(item, layer)) if item.name in names else []
        yield from ((item, number if owners[1:] else None, owner) for number, owner in enumerate(owners))


def _owners(item: Item, layer: Module) -> Iterator[Any]:
    before, each, behind = item.path.partition(f".{EACH}.")
    found = attrgetter(before)(layer)
    if not each:
        yield found
        return
    for expert in getattr(found, ONE_BY_ONE, (found,)):
        yield attrgetter(behind)(expert)


def marked_in(section: Section, layer: Module) -> tuple[object, ...]:
    """The sites of a half that are no modules: their methods hand one another what they know of a call as attributes, their own
    or those of an object that they leave the work to (a flex dispatcher's manager)."""
    owners = {id(place.owner): place.owner for place in places_of(section, layer) if place.module is None}
    inner = (held for owner in owners.values() for held in vars(owner).values() if _goes_with(owner, held))
    return (*owners.values(), *inner)


def _goes_with(owner: object, held: object) -> bool:
    return type(held).__module__ == type(owner).__module__ and hasattr(held, "__dict__")


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
