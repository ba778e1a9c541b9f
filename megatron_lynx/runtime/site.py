"""A site: one call of one submodule; its autograd graph as the half's first call recorded it; the shortcut through first sites.

The recorded graph says which saved tensors later calls replace by handles:

saved tensor                                             becomes
a parameter, or another tensor that outlives the call    unchanged
in memory of the half's inputs                           unchanged unless it may go to the host: the frame holds it anyway
made by a recomputed first part of the site              a handle of that item
in memory of an argument that is recomputed              a handle of a view of that argument
any other, of a recomputed site                          a handle
any other, if kept tensors may go to the host            an `OffloadedTensor` or a tensor

There is one graph per half and signature of its arguments (sizes rounded up to powers of two). A graph never decides about values
or sizes: the recomputation reads each tensor from the slot that the record replaced. A site with other classes of nodes keeps its
saved tensors, and the half's next call records anew.

A shortcut recomputes the half's first sites one after another, without the code around them. It needs that no tensor of the code
in between was dropped, and that each site is called with one of the half's arguments or an earlier site's output, unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lynx.anatomy import Item, Section
from megatron_lynx.nest import first_in, map_nest
from megatron_lynx.runtime.saved import Edge, Slot, detached, edges_between, memory_of, nodes_at, saved_in, storage_of, tensors_in
from megatron_lynx.runtime.surroundings import SiteState


@dataclass(frozen=True)
class FirstPart:
    """The first part of a site, where it is an item of the plan: TE computes a norm inside the linear that follows. One autograd
    node saves both parts' tensors."""

    item: str
    run: Callable[[Tensor], tuple[Tensor | None, ...]]
    """Runs this part alone on the site's argument. Returns the tensors that the node saves of it, the rest's input first."""
    node: str
    slots: Callable[[Any], tuple[int, ...]]
    """Indices of `run`'s tensors among the node's saved tensors."""

    def saved(self, nodes: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Return the tensors that `run` makes, from the nodes of a call of the whole site. Empty if it has no node: its weights
        are frozen, and its input needs no gradient."""
        for node in nodes:
            if type(node).__name__ == self.node:
                saved = node.saved_tensors
                return tuple(saved[slot] for slot in self.slots(node))
        return ()


@dataclass(frozen=True, eq=False)
class Site:
    """One submodule that is a site of the plan, or one method of several that make it up."""

    name: str
    module: torch.nn.Module | None
    """Its torch module, if it is one; another site owns no parameters."""
    forward: Callable[..., Any]
    first: FirstPart | None = None
    state: SiteState | None = None
    may_draw: bool = True
    has_next_method: bool = False
    """Whether another method of the same item follows, the only reader of its output."""

    @cached_property
    def owns_parameters(self) -> bool:
        return self.module is not None and next(self.module.parameters(), None) is not None

    @cached_property
    def segments(self) -> int:
        """Segments of a half that it takes: 2 if its first part is an item."""
        return 1 if self.first is None else 2


class SiteCall:
    __slots__ = ("_arguments", "args", "kwargs", "site")

    def __init__(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.site = site
        self.args = args
        self.kwargs = kwargs
        self._arguments: list[Tensor] | None = None

    def __call__(self) -> Any:
        return self.site.forward(*self.args, **self.kwargs)

    @property
    def arguments(self) -> list[Tensor]:
        if self._arguments is None:
            self._arguments = tensors_in((self.args, self.kwargs) if self.kwargs else self.args)
        return self._arguments

    @property
    def lasting(self) -> Iterator[Tensor]:
        """Tensors that its nodes may save and that are not activations."""
        if self.site.module is not None:
            yield from memory_of(self.site.module.parameters())
        if self.site.state is not None:
            yield from self.site.state.lasting()

    def as_recorded(self, captured: Any) -> AbstractContextManager[None]:
        """Restore the site's state (FP8 scales) as captured, inside the context."""
        return nullcontext() if self.site.state is None else self.site.state.as_captured(captured)

    def without_graph(self) -> SiteCall:
        kwargs = map_nest(Tensor, detached, self.kwargs) if self.kwargs else self.kwargs
        return SiteCall(self.site, map_nest(Tensor, detached, self.args), kwargs)


class ShortcutStep(NamedTuple):
    site: Site
    segment: int
    source: int
    """Index of its input among the half's arguments, followed by the outputs of the steps before."""


class ShortcutFinder:
    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], step_count: int | None = None) -> None:
        """`step_count`: how many steps to look for, if known."""
        self._values = [*args, *kwargs.values()]
        self._steps: list[ShortcutStep] = []
        self._left = math.inf if step_count is None else step_count

    def called(self, call: SiteCall, segment: int) -> None:
        if not self._left:
            return
        given = call.args[0] if len(call.args) == 1 and not call.kwargs else None
        for source, value in enumerate(self._values):
            if value is given and given is not None:
                self._steps.append(ShortcutStep(call.site, segment, source))
                self._left -= 1
                break
        else:
            self._left = 0
        if not self._left:
            self._values.clear()

    def returned(self, outputs: Any) -> None:
        if self._left:
            self._values.append(first_in(Tensor, outputs))

    def steps(self, lets_go: Collection[int]) -> tuple[ShortcutStep, ...]:
        """Return the steps that reach all segments with dropped tensors; empty if only the half's code reaches them."""
        wanted, shortcut = set(lets_go), []
        for step in self._steps:
            if not wanted:
                break
            shortcut.append(step)
            wanted.difference_update(range(step.segment - step.site.segments + 1, step.segment + 1))
        return () if wanted else tuple(shortcut)


Key = tuple[int, int]
"""(segment, ordinal in the segment): the same tensor in record and recomputation."""


class Replaced(NamedTuple):
    node: int
    slot: Slot
    key: Key | None
    """Is None for a tensor that is kept, on the device or the host."""
    argument: int | None = None
    part: int | None = None
    """For a view that another node has of a first part's tensor: index of the tensor."""


@dataclass(frozen=True)
class SiteGraph:
    replaced: tuple[Replaced, ...] = ()
    edges: tuple[Edge, ...] = ()
    kinds: tuple[type, ...] = ()
    views: tuple[Replaced, ...] = ()
    parts: tuple[Replaced, ...] = ()
    """Views of a first part's tensors: an adapter also saves the output of the norm inside its linear."""
    by_attribute: tuple[tuple[Replaced, ...], ...] = ()
    """All of them by node and attribute, which is read once: each read makes all wrappers again."""

    @classmethod
    def of(cls, walked: Sequence[tuple[Any, Edge]], replaced: Iterable[Replaced]) -> SiteGraph:
        """Make a graph from all `walked` nodes of a call, without those that lead to no replaced tensor."""
        replacements = tuple(replaced)
        needed = {replacement.node for replacement in replacements}
        for place in range(len(walked) - 1, -1, -1):  # a node comes after the one that leads to it
            before = walked[place][1].before
            if place in needed and before is not None:
                needed.add(before)
        places = {old: new for new, old in enumerate(sorted(needed))}
        taken = [walked[old] for old in places]
        edges = (edge if edge.before is None else edge._replace(before=places[edge.before]) for _, edge in taken)
        moved = tuple(replacement._replace(node=places[replacement.node]) for replacement in replacements)
        views = tuple(replacement for replacement in moved if replacement.argument is not None)
        parts = tuple(replacement for replacement in moved if replacement.part is not None)
        together = groupby(moved, key=lambda replacement: (replacement.node, replacement.slot.raws))
        by_attribute = tuple(tuple(of_attribute) for _, of_attribute in together)
        return cls(moved, tuple(edges), tuple(type(node) for node, _ in taken), views, parts, by_attribute)

    def nodes(self, outputs: Any, arguments: Sequence[Tensor]) -> list[Any] | None:
        """Return the nodes with replaced tensors; None if their classes differ."""
        return nodes_at(self.edges, self.kinds, outputs, arguments) if self.replaced else []


NOTHING = SiteGraph()


@dataclass(eq=False)
class RecordedGraph:
    sites: dict[int, SiteGraph] = field(default_factory=dict)
    memos: dict[int, bool] = field(default_factory=dict)
    """Kept sites that a recomputation passes: whether it reads the values of their outputs."""
    inert: frozenset[int] = frozenset()
    """Sites of which nothing is dropped, offloaded or remembered, nor of the code after them."""
    lets_go: frozenset[int] = frozenset()
    """Segments with dropped tensors. Memos exist only up to the last of these, so no tensor of other segments may be dropped."""
    shortcut: int = 0


NO_GRAPH = RecordedGraph()


class FirstCall:
    """Builds the recorded graph during the half's first call. `may_go`: whether a kept tensor may go to the host."""

    def __init__(self, section: Section, recompute: Collection[str], inputs: Any, may_go: Callable[..., bool] | None) -> None:
        self.graph = RecordedGraph()
        self._section = section
        self._recompute = recompute
        self._may_go = may_go
        self._held = {storage_of(tensor) for tensor in tensors_in(inputs)}
        self._resident = set(self._held)
        """Storages that are held until backward."""
        self.normed: dict[int, Tensor] = {}
        """Outputs of a recomputed norm, by storage. The recorder clears it: its graph refers back to the recorder."""
        self._ends: list[int] = []
        """Segments of kept sites whose values no recomputation reads, nor any from before them after them."""
        self.untouched: list[int] = []
        """Sites after which the code drops nothing, and of which no state is captured."""

    def handed(self, call: SiteCall, item: Item, after: str | None) -> None:
        """Report that a site, which is `item`, is about to be called, after the item `after`. Its inputs stay if that is kept;
        with two paths (shared experts) only code and the half's begin count, as the other path may be recomputed."""
        section = self._section
        after_kept = after not in self._recompute and (not section.two_paths or after is None or after in section.code)
        if after_kept and not item.exchanges:
            self._resident.update({storage_of(argument) for argument in call.arguments} - self.normed.keys())

    def recomputed(self, call: SiteCall, outputs: Any) -> None:
        """Report the outputs of a recomputed site. All later code may read a norm's."""
        if call.site.name == self._section.norm:
            self.normed = {storage_of(tensor): tensor for tensor in tensors_in(outputs)}

    def kept(self, segment: int, outputs: Any, *, ends_values: bool) -> None:
        """Report the outputs of a kept site. `ends_values`: no recomputation after it reads values from before it."""
        if ends_values:
            self._ends.append(segment)
        else:
            self._resident.update(map(storage_of, tensors_in(outputs)))

    def read(self, call: SiteCall, item: Item, segment: int, outputs: Any) -> None:
        walked = edges_between(outputs, call.arguments)
        self.graph.sites[segment] = SiteGraph.of(walked, self._replaced(call, item, segment, [node for node, _ in walked]))

    def _replaced(self, call: SiteCall, item: Item, segment: int, nodes: Sequence[Any]) -> Iterator[Replaced]:
        recomputed = call.site.name in self._recompute
        stays = {storage_of(tensor) for tensor in call.lasting} | (self._held if self._may_go is None else set())
        argument_at = {storage_of(tensor): index for index, tensor in reversed(list(enumerate(call.arguments)))}
        regenerated = set(argument_at)  # before a recomputation reaches the site
        if not recomputed:
            regenerated = regenerated - self._resident if self._recompute and not item.exchanges else set()
        first, own_node = self._of_first_part(call, nodes), None if call.site.first is None else call.site.first.node
        views, dropped_index = sum(len(site.views) + len(site.parts) for site in self.graph.sites.values()), 0
        for place, node in enumerate(nodes):
            for slot, tensor in saved_in(node):
                memory = [storage_of(part) for part in memory_of([tensor])]
                if not memory or not stays.isdisjoint(memory):
                    continue
                storage = memory[0]
                if storage in first and type(node).__name__ == own_node:
                    yield Replaced(place, slot, (segment - 1, first[storage]))
                elif storage in first:
                    views += 1
                    yield Replaced(place, slot, (segment - 1, -views), part=first[storage])
                elif storage in regenerated:
                    views += 1
                    yield Replaced(place, slot, (segment, -views), argument_at[storage])
                elif recomputed and storage not in argument_at:
                    yield Replaced(place, slot, (segment, dropped_index))
                    dropped_index += 1
                elif self._may_go is not None and self._may_go(tensor, any_size=item.any_rows):
                    yield Replaced(place, slot, None)

    def _of_first_part(self, call: SiteCall, nodes: Sequence[Any]) -> dict[int, int]:
        first = call.site.first
        if first is None or first.item not in self._recompute:
            return {}
        return {storage_of(tensor): index for index, tensor in enumerate(first.saved(nodes)) if tensor is not None}

    def ends(self, lets_go: Collection[int], memos: Iterable[int]) -> None:
        """End the call: choose the memos that a recomputation passes, and those of which it reads values."""
        last = max(lets_go, default=-1)
        read = [segment for segment in lets_go if not self._ends or segment <= self._ends[-1]]
        last_with_values = max(read, default=-1)
        self.graph.lets_go = frozenset(lets_go)
        self.graph.memos = {at: at < last_with_values and at not in self._ends for at in memos if at < last}
        nothing = (at for at, site in self.graph.sites.items() if at not in self.graph.memos and not site.replaced)
        self.graph.inert = frozenset(self.untouched).intersection(nothing)


def signature_of(arguments: Any) -> tuple[Any, ...]:
    """Return rounded shapes, dtypes, contiguity and `requires_grad`. Sizes 0 and 1 stay apart: views and copies differ."""
    kinds = [
        (*[size and 1 + (size - 1).bit_length() for size in one.shape], one.is_contiguous(), one.dtype, one.requires_grad)
        for one in tensors_in(arguments)
    ]
    return tuple(kinds)


Graphs = dict[frozenset[str], RecordedGraph]
"""By the items that are recomputed: experts that fall back recompute more."""


def recorded_graphs(most_signatures: int = 2048) -> Callable[[Any, Any], Graphs]:
    return lru_cache(maxsize=most_signatures)(lambda half, signature: {})
