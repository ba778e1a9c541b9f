"""Parts of a transformer layer as data: items and collectives.

A *half* is one of the two methods in which Megatron runs a layer; plans, traces and frames name it. A *section* fills a half:
`attention`, `mlp`, `experts`, ... Planner and runtime walk over sections, and know no item by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Half = Literal["attention", "mlp"]
HALVES: tuple[Half, Half] = ("attention", "mlp")
"""In forward order."""

Pass = Literal["fwd", "bwd"]
PASSES: tuple[Pass, Pass] = ("fwd", "bwd")

Role = Literal[
    "norm",
    "column_parallel",
    "down_projection",
    "inner_norm",
    "up_projection",
    "query_projection",
    "code",
    "core",
    "sparse_core",
    "kernel",
    "row_parallel",
    "router",
    "dispatch",
    "experts_in",
    "experts_out",
    "combine",
    "opaque",
    "residual",
]
"""Role of an item. `WHY_KEPT` says which ones no plan recomputes.

column_parallel  the linear whose input is gathered under sequence parallelism
down_projection  a linear of latent attention that compresses tokens. Megatron's is split by columns over tensor-parallel ranks,
                 which then gather its output; Transformer Engine's is whole on each rank
up_projection    a linear that makes heads from compressed tokens, split by columns; sequence parallelism gathers its input
query_projection the same for uncompressed queries: it reads the residual stream
sparse_core      an attention kernel that selects keys by an indexer, and trains that. Recomputed by checkpoints only
kernel           a scan, or a norm with a gate: a method of the module that calls it
row_parallel     recomputation captures its input and stops, so neither its GEMM nor its reduction is repeated
code             code between two submodules that saves tensors for backward
experts_in, _out linears of experts, one per expert or one for all of a rank
opaque           all between norm and residual addition of an opaque half
residual         bias, dropout and residual addition, the end of a section
"""

WHY_KEPT: Mapping[Role, str] = {
    "row_parallel": "its recomputation would repeat a reduction",
    "router": "its recomputation would route, count and draw again",
    "sparse_core": "it selects keys and trains its indexer",
    "dispatch": "its recomputation would exchange tokens again",
    "experts_out": "no recomputation needs its result",
    "combine": "its recomputation would exchange tokens again",
    "opaque": "nobody looks into it",
}


EXPERTS_LINEARS: tuple[Role, ...] = ("experts_in", "experts_out")
ENDS: tuple[Role, ...] = ("row_parallel", "router", "experts_out", "combine")
"""Roles of which recomputed items need only the output's shape."""
GATHERING: tuple[Role, ...] = ("column_parallel", "up_projection", "query_projection")
"""Roles of linears that gather their input under sequence parallelism; stock overlaps collectives with their backward."""


def _has_role(*roles: Role) -> cached_property[bool]:
    return cached_property(lambda item: item.role in roles)


def _named(*roles: Role) -> cached_property[tuple[str, ...]]:
    return cached_property(lambda section: tuple(item.name for item in section.items if item.role in roles))


def _only(role: Role) -> cached_property[str]:
    return cached_property(lambda section: section.item(role).name)


def _first(role: Role) -> cached_property[str]:
    return cached_property(lambda section: next((item.name for item in section.items if item.role == role), ""))


@dataclass(frozen=True)
class Item:
    """Unit of a plan's decisions: a submodule call of Megatron's layer (a *site*), or the code between two of them."""

    name: str
    role: Role
    path: str = ""
    """Attribute path of the submodule in Megatron's layer; empty for code. `*` stands for each of several experts, or for nothing
    if one module computes all."""
    methods: tuple[str, ...] = ("forward",)
    norm_inside: str = ""
    """Inner norm that Transformer Engine fuses into this linear, if any."""

    @property
    def is_site(self) -> bool:
        return bool(self.path)

    of_experts = _has_role(*EXPERTS_LINEARS)
    may_draw = _has_role("core", "residual", "router")
    """Whether it may draw random numbers: dropout, or a router."""
    ends_values = _has_role(*ENDS)
    exchanges = _has_role("dispatch", "combine")
    any_rows = _has_role("dispatch", "experts_in", "experts_out", "combine")
    """Whether its number of rows changes from call to call."""
    runs_once = _has_role("router", "dispatch", "combine")
    """Whether it must never run twice: it decides, or exchanges tokens."""

    @property
    def is_linear(self) -> bool:
        return self.role.endswith(("_parallel", "_projection"))

    @property
    def computes(self) -> bool:
        return self.is_linear or self.of_experts


@dataclass(frozen=True)
class Collective:
    """Collective of the tensor-parallel group that the compute stream waits for."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    carries: Literal["input", "output", "gradient", "input_gradient", "latent"]
    """Input of a column-parallel linear, output of a row-parallel one, their gradients; or a down-projection's output or its
    gradient."""
    behind: str
    """Item after which it is waited for, in the order of the pass: its role if unique, else its name."""
    beside: Literal["dgrad", "wgrad"] | None = None
    """GEMM of the column-parallel linear's backward that stock Megatron overlaps with it; None if exposed."""
    of: str = ""
    """Linear whose tensor it carries; empty if only one of the section can be meant."""


@dataclass(frozen=True)
class Exchange:
    """All-to-all between expert-parallel ranks that the compute stream waits for."""

    carries: Literal["tokens", "probabilities"]
    behind: Role


@dataclass(frozen=True, eq=False)
class Section:
    """Content of a half. Compared by identity: each section exists once."""

    name: str
    half: Half
    method: str
    """Method of Megatron's layer that runs it."""
    items: tuple[Item, ...]
    """In forward order."""
    collectives_of: Mapping[tuple[Pass, bool], tuple[Collective, ...]] = field(default_factory=dict)
    """By pass and sequence parallelism, in issue order."""
    exchanges_of: Mapping[Pass, tuple[Exchange, ...]] = field(default_factory=dict)
    """By pass: all-to-alls of expert parallelism."""
    fuses_norm: bool = True
    two_paths: bool = False
    """Whether items alternate between two paths (queries; keys with values): an item's output may be read by a later item than
    the next."""
    in_place: tuple[str, ...] = ()
    """A linear, and the later code that overwrites its output; may be empty."""
    owner: str = ""
    """Attribute path in Megatron's layer of the module with `method`; empty for the layer."""
    apart: tuple[str, ...] = ()
    """Items that Megatron runs outside that method, if it splits the layer into nodes. They are kept."""
    in_some_layers: bool = False
    """Whether some layers have it instead of the half's usual section. Rules of a plan need not name its items; unnamed ones are
    kept."""
    opaque: bool = False
    """Whether it is opaque: kept whole on the device, without windows or hooks."""
    captured: bool = False
    """Whether it runs as a captured graph: kept whole without windows or hooks, but priced by its items."""
    copies_go: bool = False
    """Whether a checkpoint of its half also recomputes its last linear: in FP8 or FP4 that would save a copy of its input."""

    norm, row_parallel, residual = _only("norm"), _only("row_parallel"), _only("residual")
    core, column_parallel = _first("core"), _first("column_parallel")
    ends = _named(*ENDS)
    exchanging = _named("core")
    gathering_latents = _named("up_projection")
    """Linears that gather compressed tokens under sequence parallelism. If recomputed, their gathered inputs are kept: they are
    small."""
    handing_on = _named("down_projection", *GATHERING)
    """Linears whose output no item may have saved (later code copies it), though recomputation that passes them needs it."""
    on_own_rows = _named("norm", "residual")

    def collectives(self, passing: Pass, sequence_parallel: bool) -> tuple[Collective, ...]:
        return self.collectives_of.get((passing, sequence_parallel), ())

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.items)

    @cached_property
    def of_name(self) -> Mapping[str, Item]:
        return {item.name: item for item in self.items}

    @property
    def profiled_as(self) -> str:
        return self.name if self.in_some_layers else self.half

    @cached_property
    def has_windows(self) -> bool:
        return bool(self.collectives_of) and not self.captured

    @property
    def kept_whole(self) -> bool:
        return self.opaque or self.captured

    @cached_property
    def exchanges(self) -> bool:
        """Whether its windows, if any, are token exchanges."""
        return bool(self.exchanges_of)

    @cached_property
    def exchanges_in_windows(self) -> bool:
        return any(self.exchanges_of.values())

    @cached_property
    def sites(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.is_site)

    @cached_property
    def linears(self) -> tuple[str, ...]:
        """Linears whose weight gradients can be delayed, in forward order. An item of experts stands for all of a rank."""
        return tuple(item.name for item in self.items if item.computes)

    def beside_wgrad(self, linear: str, sequence_parallel: bool) -> int | None:
        """Return the ordinal of the backward's collective that a linear's weight gradient overlaps: the reduction of its input's
        gradient; else None."""
        waited = enumerate(self.collectives("bwd", sequence_parallel))
        return next((at for at, one in waited if one.beside == "wgrad" and (one.of or self.column_parallel) == linear), None)

    def behind_wgrad(self, linear: str, sequence_parallel: bool) -> int:
        """Return the ordinal of the backward's first collective or exchange that is waited for after a linear's weight gradient;
        their number if none follows, as for shared experts, whose backward comes last."""
        waited: tuple[Collective | Exchange, ...] = self.collectives("bwd", sequence_parallel)
        waited = self.exchanges_of.get("bwd", waited)
        beside = self.beside_wgrad(linear, sequence_parallel)
        before = (at for at, one in enumerate(waited) if self.place_behind(one) < self.index(linear))
        return next(before, len(waited)) if beside is None else beside

    @cached_property
    def code_behind(self) -> Mapping[str, str]:
        following = zip(self.items, self.items[1:], strict=False)
        return {site.name: code.name for site, code in following if site.is_site and not code.is_site}

    @cached_property
    def recomputable(self) -> tuple[str, ...]:
        kept = self.names if self.kept_whole else self.apart
        return tuple(item.name for item in self.items if item.role not in WHY_KEPT and item.name not in kept)

    def run_again(self, *, whole: bool = False) -> tuple[str, ...]:
        """Return the items that a checkpointed half recomputes, in order. `whole`: its output, too, so its last linear runs, with
        its reduction, and tokens are sent back. A router runs once."""
        again = (item for item in self.items if whole or not item.ends_values or (self.copies_go and item.computes))
        return tuple(item.name for item in again if item.role != "router")

    @cached_property
    def on_rows(self) -> frozenset[str]:
        """Items recomputed if more rows arrive than planned for: they save tensors that grow with the rows, without
        communication, from the experts' first linears to before their last. Empty without experts."""
        ends = [self.names.index(item.name) for item in self.items if item.of_experts]
        return frozenset(self.names[slice(*ends)]) if ends else frozenset()

    def recomputable_among(self, context: int, *, sequence_parallel: bool = False) -> tuple[str, ...]:
        """Return the items that a plan may recompute with `context` context-parallel ranks. With several the core attention
        communicates (rule R2). The residual stream is not gathered for several linears."""
        kept = {*(self.exchanging if context > 1 else ()), *(self.gathering_rows if sequence_parallel else ())}
        if kept.intersection(self.in_place):
            kept.update(self._over_in_place)
        return tuple(item for item in self.recomputable if item not in kept)

    @cached_property
    def _over_in_place(self) -> tuple[str, ...]:
        """The overwritten linear, and all items from the code that overwrites it: that code must not run on a kept output."""
        return (self.in_place[0], *self.names[self.index(self.in_place[1]) :]) if self.in_place else ()

    def torn(self, recompute: Collection[str]) -> tuple[str, ...]:
        over = any(item in recompute for item in self._over_in_place)
        return tuple(item for item in self.in_place if over and item not in recompute)

    @cached_property
    def gathering_rows(self) -> tuple[str, ...]:
        """Linears that gather the residual stream under sequence parallelism, if several gather. They are kept then."""
        linears = (one.of for one in self.collectives("fwd", True) if one.carries == "input" and one.of)
        queries = (item.name for item in self.items if item.role == "query_projection")
        return tuple(linear for linear in dict.fromkeys((*linears, *queries)) if linear not in self.gathering_latents)

    def norms_apart(self, recompute: Collection[str]) -> tuple[Item, ...]:
        return tuple(
            item for item in self.items if item.name in recompute and item.norm_inside and item.norm_inside not in recompute
        )

    def cast_together(self, recompute: Collection[str]) -> tuple[str, ...]:
        """Return the recomputed items that cast a gathered tensor, or make it: with one scale for all ranks' parts they
        communicate in every call. A fused norm is cast with its linear."""
        inside = self.norms_inside
        return tuple(
            item.name for item in self.items if item.name in recompute and (item.role in GATHERING or item.name in inside)
        )

    @cached_property
    def norms_inside(self) -> frozenset[str]:
        return frozenset(item.norm_inside for item in self.items if item.norm_inside).union([self.norm] * self.fuses_norm)

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Items before which recomputation can stop, to resume in a later window: only sites precede them, since code between
        sites would run twice. In latent attention: the first up-projection, and that code."""
        code = next((at for at, item in enumerate(self.items) if not item.is_site), len(self.items))
        if not self.has_windows or self.column_parallel:
            return self.names[1 : code + 1] if self.has_windows else ()
        pairs = zip(self.items, self.items[1 : code + 1], strict=False)
        return tuple(item.name for before, item in pairs if before.role == "inner_norm" != item.role or not item.is_site)

    @cached_property
    def code(self) -> frozenset[str]:
        return frozenset(item.name for item in self.items if not item.is_site)

    def before(self, name: str) -> str:
        """Return the item whose output another one reads: the previous one; for a router, the norm."""
        index = self.index(name)
        return self.norm if self.items[index].role == "router" else self.names[index - 1]

    @cached_property
    def gathered(self) -> str | None:
        return self.column_parallel or None

    @cached_property
    def last_communicating(self) -> str | None:
        """Last item that communicates in a checkpoint whose output is not needed: the dispatch, or the linear with gathered
        input; None if neither is a window."""
        return self.item("dispatch").name if self.exchanges_in_windows else self.gathered if self.has_windows else None

    @cached_property
    def inner(self) -> tuple[str, ...]:
        """Items after the column-parallel linear, or the last up-projection, up to the row-parallel one."""
        before = max(self.index(item.name) for item in self.items if item.role in ("column_parallel", "up_projection"))
        return self.names[before + 1 : self.index(self.row_parallel) + 1]

    @cached_property
    def before_row_parallel(self) -> str:
        return self.names[self.index(self.row_parallel) - 1]

    def index(self, name: str) -> int:
        return self.names.index(name)

    def place_behind(self, collective: Collective | Exchange) -> int:
        behind = collective.behind
        return self.index(behind) if behind in self.names else self.index(self.item(behind).name)

    def item(self, role: str) -> Item:
        (item,) = (item for item in self.items if item.role == role)
        return item
