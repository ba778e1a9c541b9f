"""Registry of kinds, and the choice of sections for a model's layers. Names of items and kinds in files are validated here.

To add a kind, add a line to `KINDS`, one to `kinds.planning` and one to `apply.kinds` (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from megatron_lynx.kinds.captured import ROUTER, CapturedModule, in_graph
from megatron_lynx.kinds.dense.section import ATTENTION, MLP
from megatron_lynx.kinds.experts.section import EXPERTS_WITH_SHARED, IN_NODES, MIXTURES, Dispatcher
from megatron_lynx.kinds.latent.section import LATENT, SPARSE, LatentSizes
from megatron_lynx.kinds.opaque.section import OPAQUE, OpaqueName
from megatron_lynx.kinds.section import HALVES, Half, Section


class Facts(NamedTuple):
    latent: LatentSizes | None = None
    experts: bool = False
    shared_experts: bool = False
    dispatcher: Dispatcher = "alltoall"
    overlapped: bool = False
    """Whether exchanges overlap another micro-batch's compute: then layers run in nodes."""
    kinds: tuple[str, ...] = ()
    """Names of kinds that no other fact determines."""
    opaque: tuple[OpaqueName, ...] = ()
    captured: tuple[CapturedModule, ...] = ()
    copies_go: bool = False
    """Whether linears compute in FP8 or FP4, and checkpoints keep no copies of their inputs."""


USUAL = Facts()


LayerKind = tuple[Section, Section]


class Kind(NamedTuple):
    sections: tuple[Section, ...]
    """Its sections, largest of each kind; plan files may name all their items."""
    chosen: Callable[[Facts], Section | None]
    name: str = ""

    @property
    def half(self) -> Half:
        return self.sections[0].half


def _latent(facts: Facts) -> Section | None:
    if (sizes := facts.latent) is None:
        return None
    return LATENT[sizes.compressed, sizes.fused_rotary] if sizes.sparse is None else SPARSE[sizes.compressed]


def _experts(facts: Facts) -> Section | None:
    mixtures = IN_NODES if facts.overlapped or ROUTER in facts.captured else MIXTURES
    return mixtures[facts.dispatcher, facts.shared_experts] if facts.experts else None


def _opaque(half: Half) -> Callable[[Facts], Section | None]:
    return lambda facts: next((OPAQUE[name] for name in facts.opaque if OPAQUE[name].half == half), None)


KINDS: list[Kind] = [
    Kind((ATTENTION,), lambda _: ATTENTION),
    Kind((MLP,), lambda _: MLP),
    Kind((LATENT[True, False], LATENT[False, False], *SPARSE.values()), _latent),
    Kind((EXPERTS_WITH_SHARED,), _experts),
    *(Kind(tuple(one for one in OPAQUE.values() if one.half == half), _opaque(half)) for half in HALVES),
]
"""Usual content of each half first: it answers to all facts."""


def filling(half: Half) -> tuple[Section, ...]:
    return tuple(section for kind in KINDS if kind.half == half for section in kind.sections)


def names_in(half: Half) -> tuple[str, ...]:
    sections = filling(half)
    inner = [name for section in sections for name in section.names if name not in (section.norm, section.residual)]
    return (sections[0].norm, *dict.fromkeys(inner), sections[0].residual)


def spelled_out(items: Iterable[str]) -> Iterator[str]:
    """Yield items of a plan file; the name of a section that only some layers have stands for all between norm and residual."""
    known = {section.name: section for half in HALVES for section in filling(half) if section.in_some_layers}
    for item in items:
        yield from known[item].names[1:-1] if item in known else (item,)


def all_items() -> tuple[str, ...]:
    return tuple(name for half in HALVES for name in names_in(half))


def sections_of(facts: Facts = USUAL) -> LayerKind:
    sections: dict[Half, Section] = {}
    for kind in KINDS:  # the last that answers
        if (section := kind.chosen(facts)) is not None:
            sections[section.half] = section
    attention, mlp = (in_graph(sections[half], facts.captured) for half in HALVES)
    return (_without_copies(attention), _without_copies(mlp)) if facts.copies_go else (attention, mlp)


@cache
def _without_copies(section: Section) -> Section:
    return section if section.opaque else replace(section, copies_go=True)


def halves_of(facts: Facts) -> Mapping[Half, Section]:
    return dict(zip(HALVES, sections_of(facts._replace(experts=False)), strict=True))


def _one_of(names: Callable[[], tuple[str, ...]]) -> AfterValidator:
    """Validate a name against a list read at check time, since kinds can be added."""

    def check(text: str) -> str:
        if text not in names():
            expected = ", ".join(repr(name) for name in names()) or "nothing: there are no such kinds"
            raise PydanticCustomError("literal_error", "no such name", {"expected": expected})
        return text

    return AfterValidator(check)


ItemName = Annotated[str, _one_of(all_items), WithJsonSchema({"enum": list(all_items()), "type": "string"})]

KindName = Annotated[str, _one_of(lambda: tuple(kind.name for kind in KINDS if kind.name)), WithJsonSchema({"type": "string"})]
