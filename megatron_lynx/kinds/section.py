"""What a part of a transformer layer consists of, as data: the items in it, and the collectives that it waits for.

    layer    attention half  ──filled by──>  Section "attention"    input_layernorm  linear_qkv  rotary  core_attention  ...
             mlp half        ──filled by──>  Section "mlp"          pre_mlp_layernorm  linear_fc1  activation  linear_fc2  ...
                              (or by)        Section "experts"      pre_mlp_layernorm  router  dispatch  experts_fc1  ...

A *half* is one of the two methods in which Megatron runs a layer, and the name by which plans, traces and frames know it. A
*section* is what fills a half. Everything that plans, prices, records or replays walks over sections; nobody else knows the names
of items or how many collectives there are. A new kind of layer is a new section (see docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Half = Literal["attention", "mlp"]
HALVES: tuple[Half, Half] = ("attention", "mlp")
"""In the order of a forward."""

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
    "row_parallel",
    "router",
    "dispatch",
    "experts_in",
    "experts_out",
    "combine",
    "opaque",
    "residual",
]
"""What an item is for.

norm             a normalisation; under sequence parallelism it works on the rank's own rows
column_parallel  the linear of a section whose input is gathered under sequence parallelism
down_projection  a linear of latent attention that compresses tokens. Megatron's own is cut over tensor-parallel ranks, by
                 columns, which then gather what they made; Transformer Engine's is whole on each rank
inner_norm       a normalisation of what was compressed
up_projection    a linear that makes heads of what was compressed, cut by columns; sequence parallelism gathers its input
query_projection the same for queries that are not compressed: it reads the residual stream
core             an attention kernel
row_parallel     a linear whose output is reduced over the tensor-parallel group. Always kept: its input is captured when a replay
                 reaches it, so neither its GEMM nor its reduction runs again
code             code between two submodules that saves tensors for backward
router           decides which tokens go to which experts, and counts them. Always kept: it decides once
dispatch         brings tokens to the ranks of their experts. Always kept: tokens travel once
experts_in       the first linears of experts, one for each expert or one for all of a rank; they exchange nothing themselves
experts_out      the second linears of experts. Always kept, as a row-parallel one is
combine          brings tokens back. Always kept
opaque           everything between norm and residual addition of a half that nobody looks into. Always kept
residual         bias, dropout and residual addition, which end a section
"""

WHY_KEPT: Mapping[Role, str] = {
    "row_parallel": "its replay would repeat a reduction",
    "router": "its replay would route, count and draw again",
    "dispatch": "its replay would exchange tokens again",
    "experts_out": "no replay needs what it returns",
    "combine": "its replay would exchange tokens again",
    "opaque": "nobody looks into it",
}
"""Roles of items that no plan replays, and why."""


EXPERTS_LINEARS: tuple[Role, ...] = ("experts_in", "experts_out")
"""Roles of items that stand for the linears of several experts."""


@dataclass(frozen=True)
class Item:
    """One thing that a plan decides about: a submodule call of Megatron's layer (a *site*), or the code between two of them."""

    name: str
    role: Role
    path: str = ""
    """Where the submodule is, as an attribute path of Megatron's layer; empty for code between two submodules. In it `*` stands
    for each of several experts, or for nothing where one module computes for all of them."""
    methods: tuple[str, ...] = ("forward",)
    """The methods that make it up, in the order in which they are called."""
    norm_inside: str = ""
    """The norm of what was compressed that Transformer Engine makes inside this linear; empty where there is none."""

    @property
    def is_site(self) -> bool:
        return bool(self.path)

    @property
    def is_linear(self) -> bool:
        return self.role.endswith(("_parallel", "_projection"))

    @property
    def computes(self) -> bool:
        """Whether it is a linear, or stands for those of several experts."""
        return self.is_linear or self.of_experts

    @property
    def of_experts(self) -> bool:
        """Whether it stands for the linears of several experts."""
        return self.role in EXPERTS_LINEARS

    @property
    def may_draw(self) -> bool:
        """Whether it may draw random numbers: what drops out does, and a router may."""
        return self.role in ("core", "residual", "router")

    @property
    def ends_values(self) -> bool:
        """Whether nothing that is replayed reads the values of what it returns: a replay that passes it needs their shapes."""
        return self.role in ("row_parallel", "router", "experts_out", "combine")

    @property
    def exchanges(self) -> bool:
        """Whether it brings tokens to other ranks, or back."""
        return self.role in ("dispatch", "combine")

    @property
    def any_rows(self) -> bool:
        """Whether it works on other numbers of rows in each call."""
        return self.role in ("dispatch", "experts_in", "experts_out", "combine")

    @property
    def runs_once(self) -> bool:
        """Whether it must not run in a replay in any case: it decides, or exchanges tokens."""
        return self.role in ("router", "dispatch", "combine")


@dataclass(frozen=True)
class Collective:
    """A collective of the tensor-parallel group for which the compute stream waits."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    carries: Literal["input", "output", "gradient", "input_gradient", "latent"]
    """Of the section's linears: what a column-parallel one reads, what a row-parallel one makes, and the gradients of both; what
    a down-projection made, or its gradient."""
    behind: str
    """The item behind whose work, in the order of the pass, it is waited for: its role if only one has it, else its name."""
    beside: Literal["dgrad", "wgrad"] | None = None
    """The GEMM of the column-parallel linear's backward behind which stock Megatron hides it; None: it is exposed."""
    of: str = ""
    """The linear whose tensor it carries. Empty: the section's only one that reads, or makes, such a tensor."""


@dataclass(frozen=True)
class Exchange:
    """An all-to-all between the ranks over which experts are shared out, for which the compute stream waits."""

    carries: Literal["tokens", "probabilities"]
    """Rows on their way to experts or back, or what they are weighted with; in backward the gradients of these."""
    behind: Role
    """As of a collective."""


@dataclass(frozen=True, eq=False)
class Section:
    """One content of a half. Compared by identity: each section exists once."""

    name: str
    half: Half
    method: str
    """The method of Megatron's layer that runs it."""
    items: tuple[Item, ...]
    """In the order of a forward."""
    collectives_of: Mapping[tuple[Pass, bool], tuple[Collective, ...]] = field(default_factory=dict)
    """By pass, and by whether sequence parallelism is on: in the order in which they are issued."""
    exchanges_of: Mapping[Pass, tuple[Exchange, ...]] = field(default_factory=dict)
    """By pass: the all-to-alls of experts that are shared out over ranks."""
    fuses_norm: bool = True
    """Whether Transformer Engine makes its norm inside the linear behind it."""
    two_paths: bool = False
    """Whether items alternate between two paths, of queries and of keys with values, say: what one returned, a later one than the
    next may read."""
    in_place: tuple[str, ...] = ()
    """A linear, and the code behind it that overwrites what it returned. Empty: nothing does."""
    owner: str = ""
    """Whose method that is, as an attribute path of Megatron's layer; empty: the layer's own."""
    apart: tuple[str, ...] = ()
    """The items that Megatron runs outside of that method, where it runs a layer in nodes. They are kept."""
    profiled: str = ""
    """The key of a profile that has its figures, where that is not the half's: some layers have this section then, and others the
    half's usual one. A plan's rules need not name its items: what they do not name is kept."""
    opaque: bool = False
    """Whether nobody looks into it: it is kept whole, on the device, has no windows, and no hook is on its layer's half."""
    captured: bool = False
    """Whether it runs as a captured graph: then all of that holds of it, too, but what is inside is known, and priced as ever."""
    copies_go: bool = False
    """Whether its last linear runs again, too, where its half is checkpointed: it computes in FP8 or FP4, and would keep a copy
    of its own of what it reads."""

    def collectives(self, passing: Pass, sequence_parallel: bool) -> tuple[Collective, ...]:
        """What it waits for in one pass, in order, where the tensor-parallel group has more than one rank."""
        return self.collectives_of.get((passing, sequence_parallel), ())

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its items, in the order of a forward."""
        return tuple(item.name for item in self.items)

    @cached_property
    def of_name(self) -> Mapping[str, Item]:
        """Its items by name."""
        return {item.name: item for item in self.items}

    @property
    def profiled_as(self) -> str:
        """The key of a profile that has its figures."""
        return self.profiled or self.half

    @property
    def in_some_layers(self) -> bool:
        """Whether it stands in place of the half's usual section in some layers."""
        return bool(self.profiled)

    @cached_property
    def has_windows(self) -> bool:
        """Whether its collectives of the tensor-parallel group are windows. Those of others have no addresses."""
        return bool(self.collectives_of) and not self.captured

    @property
    def kept_whole(self) -> bool:
        """Whether plans do nothing in it, and no hook is on its layer's half."""
        return self.opaque or self.captured

    @cached_property
    def exchanges(self) -> bool:
        """Whether its windows, if it has any, are exchanges of tokens between the ranks that share out experts."""
        return bool(self.exchanges_of)

    @cached_property
    def exchanges_in_windows(self) -> bool:
        """Whether these exchanges are windows."""
        return any(self.exchanges_of.values())

    @cached_property
    def sites(self) -> tuple[Item, ...]:
        """The items that are submodule calls."""
        return tuple(item for item in self.items if item.is_site)

    @cached_property
    def linears(self) -> tuple[str, ...]:
        """Its linears whose weight gradients may be deferred, in the order of a forward. An item of experts stands for all of a
        rank's."""
        return tuple(item.name for item in self.items if item.computes)

    def beside_wgrad(self, linear: str, sequence_parallel: bool) -> int | None:
        """The ordinal of the backward's collective that the weight gradient of a linear hides where it is computed at once: the
        reduction of its input's gradient. None where there is none."""
        waited = enumerate(self.collectives("bwd", sequence_parallel))
        return next((at for at, one in waited if one.beside == "wgrad" and (one.of or self.column_parallel) == linear), None)

    def behind_wgrad(self, linear: str, sequence_parallel: bool) -> int:
        """The ordinal of the backward's first collective, or exchange, that is waited for behind the place where the weight
        gradient of a linear is computed, or deferred; as many as there are where none is. Of shared experts none is: their
        backward comes when that of the others is over."""
        waited: tuple[Collective | Exchange, ...] = self.collectives("bwd", sequence_parallel)
        waited = self.exchanges_of.get("bwd", waited)
        beside = self.beside_wgrad(linear, sequence_parallel)
        before = (at for at, one in enumerate(waited) if self.place_behind(one) < self.index(linear))
        return next(before, len(waited)) if beside is None else beside

    @cached_property
    def code_behind(self) -> Mapping[str, str]:
        """By site: the item that the code right behind it belongs to, where that is another one."""
        following = zip(self.items, self.items[1:], strict=False)
        return {site.name: code.name for site, code in following if site.is_site and not code.is_site}

    @cached_property
    def replayable(self) -> tuple[str, ...]:
        """The items that a plan may replay."""
        kept = self.names if self.kept_whole else self.apart
        return tuple(item.name for item in self.items if item.role not in WHY_KEPT and item.name not in kept)

    def run_again(self, *, whole: bool = False) -> tuple[str, ...]:
        """The items that run again in a half that is checkpointed, in order. `whole`: it returns its output again, so its last
        linear runs, with its reduction, and rows of experts travel back. A router decides once."""
        again = (item for item in self.items if whole or not item.ends_values or (self.copies_go and item.computes))
        return tuple(item.name for item in again if item.role != "router")

    @cached_property
    def on_rows(self) -> frozenset[str]:
        """The items that run again where more rows come than a plan holds for, because what they save grows with these and they
        do not communicate: what lies between the dispatch and the experts' last linears. Empty without experts."""
        ends = [self.names.index(item.name) for item in self.items if item.role in ("experts_in", "experts_out")]
        return frozenset(self.names[slice(*ends)]) if ends else frozenset()

    def replayable_among(self, context: int, *, sequence_parallel: bool = False) -> tuple[str, ...]:
        """The items that a plan may replay with so many context-parallel ranks. With several the core attention exchanges keys
        and values, which a replay must not do again (rule R2). Nor is the residual stream gathered for several linears."""
        kept = {*(self.exchanging if context > 1 else ()), *(self.gathering_rows if sequence_parallel else ())}
        if kept.intersection(self.in_place):
            kept.update(self._over_in_place)
        return tuple(item for item in self.replayable if item not in kept)

    @cached_property
    def _over_in_place(self) -> tuple[str, ...]:
        """The linear whose output is overwritten, and all from the code on that overwrites it: no replay may run that code on
        what was kept of the output."""
        return (self.in_place[0], *self.names[self.index(self.in_place[1]) :]) if self.in_place else ()

    def torn(self, replay: Collection[str]) -> tuple[str, ...]:
        """What would have to be replayed as well, so that nothing is overwritten twice."""
        over = any(item in replay for item in self._over_in_place)
        return tuple(item for item in self.in_place if over and item not in replay)

    @cached_property
    def gathering_rows(self) -> tuple[str, ...]:
        """The linears that gather the residual stream under sequence parallelism, where there is more than one that gathers: they
        are kept then."""
        found = (one.of for one in self.collectives("fwd", True) if one.carries == "input" and one.of)
        return tuple(linear for linear in found if linear not in self.gathering_latents)

    @cached_property
    def handing_on(self) -> tuple[str, ...]:
        """The linears whose output nobody may save, although a replay that passes them needs it: code behind them copies it."""
        roles = ("column_parallel", "down_projection", "up_projection", "query_projection")
        return tuple(item.name for item in self.items if item.role in roles)

    @cached_property
    def gathering_latents(self) -> tuple[str, ...]:
        """The linears that gather what was compressed under sequence parallelism. That is small: where they are replayed, what
        they gathered is kept for it, so that nothing is gathered again."""
        return tuple(item.name for item in self.items if item.role == "up_projection")

    def norms_apart(self, replay: Collection[str]) -> tuple[Item, ...]:
        """The up-projections that are replayed without the norm that Transformer Engine makes inside them."""
        return tuple(item for item in self.items if item.name in replay and item.norm_inside and item.norm_inside not in replay)

    def cast_together(self, replay: Collection[str]) -> tuple[str, ...]:
        """The replayed items that cast what sequence parallelism gathers, or make it: with one scale for the parts of all ranks
        they communicate in every call. A norm inside a linear is cast with it."""
        inside = {item.norm_inside for item in self.items} | ({self.norm} if self.fuses_norm else set())
        gathering = ("column_parallel", "up_projection", "query_projection")
        return tuple(item.name for item in self.items if item.name in replay and (item.role in gathering or item.name in inside))

    @cached_property
    def exchanging(self) -> tuple[str, ...]:
        """The items in which context-parallel ranks exchange what they have."""
        return tuple(item.name for item in self.items if item.role == "core")

    @cached_property
    def core(self) -> str:
        """The item in which tokens attend to each other; empty where none does."""
        return next((item.name for item in self.items if item.role == "core"), "")

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """The items before which a replay can stop, to go on in a later window: those before which only sites run. Code between
        sites would run a second time. Of latent attention: where heads begin to be made, and that code."""
        code = next((at for at, item in enumerate(self.items) if not item.is_site), len(self.items))
        if not self.has_windows or self.column_parallel:
            return self.names[1 : code + 1] if self.has_windows else ()
        both = zip(self.items, self.items[1 : code + 1], strict=False)
        return tuple(item.name for before, item in both if before.role == "inner_norm" != item.role or not item.is_site)

    @cached_property
    def code(self) -> frozenset[str]:
        """The items that are no submodule."""
        return frozenset(item.name for item in self.items if not item.is_site)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The items of which a replay needs no values, in order."""
        return tuple(item.name for item in self.items if item.ends_values)

    def before(self, name: str) -> str:
        """The item whose output another one reads: the one before it, but for a router, which reads the norm's."""
        index = self.index(name)
        return self.norm if self.items[index].role == "router" else self.names[index - 1]

    @cached_property
    def norm(self) -> str:
        return self.item("norm").name

    @cached_property
    def column_parallel(self) -> str:
        """The linear whose input is gathered under sequence parallelism; empty where there is not just one."""
        return next((item.name for item in self.items if item.role == "column_parallel"), "")

    @cached_property
    def gathered(self) -> str | None:
        """The same, and None for a section that has no such linear."""
        return self.column_parallel or None

    @cached_property
    def last_communicating(self) -> str | None:
        """The last item that communicates when a checkpoint runs again and nobody needs what it returns: the dispatch, or the
        linear whose input sequence parallelism gathers. None where neither is a window."""
        return self.item("dispatch").name if self.exchanges_in_windows else self.gathered if self.has_windows else None

    @cached_property
    def row_parallel(self) -> str:
        return self.item("row_parallel").name

    @cached_property
    def residual(self) -> str:
        """The bias, dropout and residual addition at its end."""
        return self.item("residual").name

    @cached_property
    def inner(self) -> tuple[str, ...]:
        """What runs behind the column-parallel linear, or the last up-projection, up to the row-parallel one."""
        before = max(self.index(item.name) for item in self.items if item.role in ("column_parallel", "up_projection"))
        return self.names[before + 1 : self.index(self.row_parallel) + 1]

    @cached_property
    def before_row_parallel(self) -> str:
        """The item whose output the row-parallel linear reads. Where it is replayed, that output is regenerated."""
        return self.names[self.index(self.row_parallel) - 1]

    @cached_property
    def on_own_rows(self) -> frozenset[str]:
        """The items that work on a rank's own rows under sequence parallelism: norm and residual addition."""
        return frozenset(item.name for item in self.items if item.role in ("norm", "residual"))

    def index(self, name: str) -> int:
        """The place of an item among all."""
        return self.names.index(name)

    def place_behind(self, collective: Collective | Exchange) -> int:
        """The place of the item behind whose work a collective is waited for."""
        behind = collective.behind
        return self.index(behind) if behind in self.names else self.index(self.item(behind).name)

    def item(self, role: str) -> Item:
        """The only item with this role."""
        (item,) = (item for item in self.items if item.role == role)
        return item
