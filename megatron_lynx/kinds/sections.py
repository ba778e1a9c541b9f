"""Which kinds of sections there are, and which of them fill the halves of a model's layers: plans, jobs, profiles and live layers
are read with this.

    facts of a model ──> for each half, the last kind of KINDS that answers ──> a section

A new kind is one line more in `KINDS`, one in `kinds.planning` and one in `apply.kinds` (docs/architecture.md).

Files name items and kinds; a wrong name is answered with those that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from megatron_lynx.kinds.captured import ROUTER, CapturedModule, in_graph
from megatron_lynx.kinds.dense.section import ATTENTION, MLP
from megatron_lynx.kinds.experts.section import EXPERTS_WITH_SHARED, IN_NODES, MIXTURES, Dispatcher
from megatron_lynx.kinds.latent.section import LATENT, latent_section
from megatron_lynx.kinds.latent.sizes import LatentSizes
from megatron_lynx.kinds.opaque.section import OPAQUE, OpaqueName
from megatron_lynx.kinds.section import HALVES, Half, Section


class Facts(NamedTuple):
    """What of a model, or of one of its layers, decides which kinds fill the halves."""

    te: bool = False
    """Whether the layers are Transformer Engine's."""
    latent: LatentSizes | None = None
    """The sizes of multi-latent attention, where that is the attention."""
    experts: bool = False
    """Whether the layer has a mixture of experts."""
    shared_experts: bool = False
    """Whether that has shared experts."""
    dispatcher: Dispatcher = "alltoall"
    """Who brings tokens to them."""
    overlapped: bool = False
    """Whether their exchanges run beside the computing of another micro-batch: then layers run in nodes."""
    kinds: tuple[str, ...] = ()
    """The names of kinds that no other fact speaks of."""
    opaque: tuple[OpaqueName, ...] = ()
    """Of one layer: what nobody looks into."""
    captured: tuple[CapturedModule, ...] = ()
    """The modules that run as captured graphs."""
    copies_go: bool = False
    """Whether linears compute in FP8 or FP4, and checkpoints keep no copies of what they read."""


USUAL = Facts()
"""Those of a layer with the usual attention and an MLP."""


LayerKind = tuple[Section, Section]
"""What fills the halves of a layer, in the order of a forward: layers with the same are alike."""


class Kind(NamedTuple):
    """What may fill a half."""

    sections: tuple[Section, ...]
    """Its sections, the most of each: plan files know the items of all of them."""
    chosen: Callable[[Facts], Section | None]
    """The section that fills the half of a layer with these facts. None: it is of another kind."""
    name: str = ""
    """How `Facts.kinds` names it, where no other fact speaks of it."""

    @property
    def half(self) -> Half:
        return self.sections[0].half


def _latent(facts: Facts) -> Section | None:
    return None if facts.latent is None else latent_section(facts.latent, te=facts.te)


def _experts(facts: Facts) -> Section | None:
    mixtures = IN_NODES if facts.overlapped or ROUTER in facts.captured else MIXTURES
    return mixtures[facts.dispatcher, facts.shared_experts] if facts.experts else None


def _opaque(half: Half) -> Callable[[Facts], Section | None]:
    return lambda facts: next((OPAQUE[name] for name in facts.opaque if OPAQUE[name].half == half), None)


KINDS: list[Kind] = [
    Kind((ATTENTION,), lambda _: ATTENTION),
    Kind((MLP,), lambda _: MLP),
    Kind((LATENT[True, False, False], LATENT[False, False, False]), _latent),
    Kind((EXPERTS_WITH_SHARED,), _experts),
    *(Kind(tuple(one for one in OPAQUE.values() if one.half == half), _opaque(half)) for half in HALVES),
]
"""The usual content of each half first: it answers to all facts."""


def filling(half: Half) -> tuple[Section, ...]:
    """What may fill a half, the most of each kind, the usual one first."""
    return tuple(section for kind in KINDS if kind.half == half for section in kind.sections)


def names_in(half: Half) -> tuple[str, ...]:
    """Every item that plan files know of a half, each kind's in the order of a forward."""
    sections = filling(half)
    inner = [name for section in sections for name in section.names if name not in (section.norm, section.residual)]
    return (sections[0].norm, *dict.fromkeys(inner), sections[0].residual)


def all_items() -> tuple[str, ...]:
    """Every item that plan files know."""
    return tuple(name for half in HALVES for name in names_in(half))


def kind_names() -> tuple[str, ...]:
    """The names of kinds that no fact but `Facts.kinds` speaks of."""
    return tuple(kind.name for kind in KINDS if kind.name)


def sections_of(facts: Facts = USUAL) -> LayerKind:
    """What fills the halves of a layer, in the order of a forward."""
    found: dict[Half, Section] = {}
    for kind in KINDS:  # the last one that answers
        if (section := kind.chosen(facts)) is not None:
            found[section.half] = section
    attention, mlp = (in_graph(found[half], facts.captured) for half in HALVES)
    return (_without_copies(attention), _without_copies(mlp)) if facts.copies_go else (attention, mlp)


@cache
def _without_copies(section: Section) -> Section:
    return section if section.opaque else replace(section, copies_go=True)


def halves_of(facts: Facts) -> Mapping[Half, Section]:
    """What fills the halves of those layers of a model that have the usual content of what only some layers have otherwise."""
    return dict(zip(HALVES, sections_of(facts._replace(experts=False)), strict=True))


def _one_of(names: Callable[[], tuple[str, ...]]) -> AfterValidator:
    """Text must be one of these names; asked when it is checked, so that kinds may still be added."""

    def check(text: str) -> str:
        if text not in names():
            expected = ", ".join(repr(name) for name in names()) or "nothing: there are no such kinds"
            raise PydanticCustomError("literal_error", "no such name", {"expected": expected})
        return text

    return AfterValidator(check)


ItemName = Annotated[str, _one_of(all_items), WithJsonSchema({"enum": list(all_items()), "type": "string"})]
"""Every item that plan files know."""

KindName = Annotated[str, _one_of(kind_names), WithJsonSchema({"type": "string"})]
"""A kind of what fills a half that no key of its own speaks of."""
