"""The autograd graph of a half as its first call recorded it: which saved tensors of which nodes later calls replace by handles.

    first call     each site's nodes are walked, every saved tensor is read and compared with what the site was called with
                   ──> a recorded graph: the edges that lead to nodes, the slots in them, which memos remain
    later calls    the edges lead to the nodes, whose kinds are compared; hooks go on the slots that the graph names
                   other kinds: that site keeps what it saved, nothing new is let go, and the half's next call records anew

saved tensor (numbers as in `record`)                    becomes
a parameter, or what else outlives the call              nothing: it stays
in the memory of what the half was handed                nothing, unless that may go to the host: the frame holds it anyway
made by a replayed first part of the site                a handle, of that item                         [6]
in the memory of an argument that a replay makes again   a handle, as a view of that argument           [3]
any other, of a replayed site                            a handle
any other, where what is kept may go to the host         what the offload group makes of it             [7]

There is a graph for each half and for each signature of its arguments, in which sizes are rounded up to powers of two: sequences
of ever new lengths follow few graphs. It never decides about values or sizes: the replay takes each tensor from the slot where
the record let it go. One that is out of date costs memory for one call, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lynx.anatomy import Item, Section
from megatron_lynx.runtime.saved import Edge, Slot, edges_between, memory_of, nodes_at, saved_in, storage_of, tensors_in
from megatron_lynx.runtime.site import SiteCall

Key = tuple[int, int]
"""(segment, ordinal within the segment): the same tensor in a record and in its replay."""


class View(NamedTuple):
    """A saved tensor that is a part of an argument of its site, or another shape of it: how to find it in the replayed argument.
    Made in each record, because arguments of experts have other numbers of rows in each."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, saved: Tensor) -> View:
        return cls(saved.size(), saved.stride(), int(saved.storage_offset()))

    def in_(self, argument: Tensor) -> Tensor:
        return argument.detach().as_strided(self.size, self.stride, self.offset)


class Replaced(NamedTuple):
    """A saved tensor of one of a site's nodes in whose place autograd gets something else."""

    node: int
    """The node's place among the site's."""
    slot: Slot
    key: Key | None
    """The key of a tensor that is let go. None: it is kept, on the device or on the host."""
    argument: int | None = None
    """Where it is let go as a view of an argument of its site: the place of that argument."""


class Together(NamedTuple):
    """The replaced tensors that one attribute of one node gives at once: asking for it again makes all its wrappers again."""

    node: int
    slot: Slot
    """The slot of the first of them."""
    replaced: tuple[Replaced, ...]


@dataclass(frozen=True)
class SiteGraph:
    """The nodes of one site's call, as far as anything is replaced in them."""

    replaced: tuple[Replaced, ...] = ()
    edges: tuple[Edge, ...] = ()
    """The edges from what the site returned to the nodes in which they are."""
    kinds: tuple[type, ...] = ()
    """The classes of these nodes."""
    views: tuple[Replaced, ...] = ()
    """The replaced tensors that are views of an argument."""
    by_attribute: tuple[Together, ...] = ()
    """All replaced tensors, by node and attribute."""

    @classmethod
    def of(cls, walked: Sequence[tuple[Any, Edge]], replaced: Iterable[Replaced]) -> SiteGraph:
        """`walked`: all nodes of a call; those are left out that lead to nothing that is replaced."""
        found = tuple(replaced)
        needed = {one.node for one in found}
        for place in range(len(walked) - 1, -1, -1):  # a node comes behind the one that leads to it
            before = walked[place][1].before
            if place in needed and before is not None:
                needed.add(before)
        places = {old: new for new, old in enumerate(sorted(needed))}
        taken = [walked[old] for old in places]
        edges = (edge if edge.before is None else edge._replace(before=places[edge.before]) for _, edge in taken)
        moved = tuple(one._replace(node=places[one.node]) for one in found)
        views = tuple(one for one in moved if one.argument is not None)
        return cls(moved, tuple(edges), tuple(type(node) for node, _ in taken), views, tuple(_by_attribute(moved)))

    def nodes(self, outputs: Any, arguments: Sequence[Tensor]) -> list[Any] | None:
        """The nodes of a call of the site in which anything is replaced; None where they are of other kinds."""
        return nodes_at(self.edges, self.kinds, outputs, arguments) if self.replaced else []


def _by_attribute(replaced: Iterable[Replaced]) -> Iterator[Together]:
    for (node, _), together in groupby(replaced, key=lambda one: (one.node, one.slot.raws)):
        of_node = tuple(together)
        yield Together(node, of_node[0].slot, of_node)


NOTHING = SiteGraph()
"""The graph of a site that was not called when the half's graph was recorded."""


@dataclass
class RecordedGraph:
    """What the first call of a half has recorded for those after it, by segment."""

    sites: dict[int, SiteGraph] = field(default_factory=dict)
    memos: dict[int, bool] = field(default_factory=dict)
    """The kept sites that a replay passes, each with whether it needs the values that the site returned."""
    inert: frozenset[int] = frozenset()
    """Sites of which nothing is let go, sent out or remembered, and neither of the code behind them."""
    lets_go: frozenset[int] = frozenset()
    """The segments in which anything is let go. A replay needs the memos before the last of them, so nothing may be elsewhere."""
    shortcut: int = 0
    """How many sites lead there without the half's code; 0 where that is needed."""


class FirstCall:
    """The first call of a half while it runs: what it notes becomes the graph that later calls follow.

    `inputs`: what its frame holds for the replay. `may_go(tensor, any_size=)`: whether a tensor that is kept may go to the host;
    None where nothing of the half does.
    """

    def __init__(self, section: Section, replay: Collection[str], inputs: Any, may_go: Callable[..., bool] | None) -> None:
        self.graph = RecordedGraph()
        self._section = section
        self._replay = replay
        self._may_go = may_go
        self._held = {storage_of(tensor) for tensor in tensors_in(inputs)}
        """Storages that the frame holds until its replay, on the device."""
        self._resident = set(self._held)
        """Storages that are held until backward anyway."""
        self.normed: dict[int, Tensor] = {}
        """What a replayed norm returned, by storage. Whoever runs the call clears it: its graph refers back to the recorder."""
        self._ends_at: int | None = None
        """The last segment behind which no replay reads values. None: there is none, as where a half runs again to its end."""
        self._untouched: list[int] = []

    def going_on(self, before: RecordedGraph, segment: int) -> RecordedGraph:
        """Its graph, where what came up to a segment of this call was recorded by another one that replays the same there."""
        self.graph.sites.update({at: site for at, site in before.sites.items() if at <= segment})
        return self.graph

    def handed(self, call: SiteCall, item: Item, behind: str | None) -> None:
        """A site, which is this item, is about to be called, behind the item of that name."""
        if self._hands_on_what_stays(behind) and not item.exchanges:
            self._resident.update({storage_of(argument) for argument in call.arguments} - self.normed.keys())

    def _hands_on_what_stays(self, item: str | None) -> bool:
        """Whether what is handed to a site stays because the item right before it is kept. Where there are two paths, that is
        code, or the half's beginning: what a kept site returned stays in any case, and what comes from the other path may be
        made again, whatever is kept here."""
        return item not in self._replay and (not self._section.two_paths or item is None or item in self._section.code)

    def replayed(self, call: SiteCall, outputs: Any) -> None:
        """A site that is replayed returned. What a norm makes, everything behind may read."""
        if call.site.name == self._section.norm:
            self.normed = {storage_of(tensor): tensor for tensor in tensors_in(outputs)}

    def kept(self, segment: int, outputs: Any, *, ends_values: bool) -> None:
        """A site that is kept returned. `ends_values`: no replay behind it reads values from before it."""
        if ends_values:
            self._ends_at = segment
        else:
            self._resident.update(map(storage_of, tensors_in(outputs)))

    def untouched(self, segment: int) -> None:
        """The code behind a site lets nothing go, and nothing that the site keeps from call to call is captured."""
        self._untouched.append(segment)

    def read(self, call: SiteCall, item: Item, segment: int, outputs: Any) -> None:
        """Read the graph of a site's call, which returned `outputs`."""
        walked = edges_between(outputs, call.arguments)
        self.graph.sites[segment] = SiteGraph.of(walked, self._replaced(call, item, segment, [node for node, _ in walked]))

    def _replaced(self, call: SiteCall, item: Item, segment: int, nodes: Sequence[Any]) -> Iterator[Replaced]:
        replayed = call.site.name in self._replay
        stays = {storage_of(tensor) for tensor in call.lasting} | (self._held if self._may_go is None else set())
        argument_at = {storage_of(tensor): index for index, tensor in reversed(list(enumerate(call.arguments)))}
        regenerated = self._regenerated(argument_at, item, replayed=replayed)
        first = self._of_first_part(call, nodes)
        views, own = sum(len(site.views) for site in self.graph.sites.values()), 0
        for place, node in enumerate(nodes):
            for slot, tensor in saved_in(node):
                memory = [storage_of(part) for part in memory_of([tensor])]
                if not memory or not stays.isdisjoint(memory):
                    continue
                storage = memory[0]
                if storage in first:
                    yield Replaced(place, slot, (segment - 1, first[storage]))
                elif storage in regenerated:
                    views += 1
                    yield Replaced(place, slot, (segment, -views), argument_at[storage])
                elif replayed and storage not in argument_at:
                    yield Replaced(place, slot, (segment, own))
                    own += 1
                elif self._may_go is not None and self._may_go(tensor, any_size=item.any_rows):
                    yield Replaced(place, slot, None)

    def _regenerated(self, arguments: Collection[int], item: Item, *, replayed: bool) -> set[int]:
        """Storages of arguments that a replay makes again before it reaches the site."""
        if replayed:
            return set(arguments)
        return set(arguments) - self._resident if self._replay and not item.exchanges else set()

    def _of_first_part(self, call: SiteCall, nodes: Sequence[Any]) -> dict[int, int]:
        """From the storages of what a replayed first part made to the place of each among its tensors."""
        first = call.site.first
        if first is None or first.item not in self._replay:
            return {}
        return {storage_of(tensor): index for index, tensor in enumerate(first.saved(nodes)) if tensor is not None}

    def ends(self, lets_go: Collection[int], memos: Iterable[int]) -> None:
        """The call is over. In these segments anything was let go, and behind these there are memos, of which no more is needed
        than a replay passes, and of what it passes only to reach the code behind the last site that ends them not the values."""
        last = max(lets_go, default=-1)
        read = [segment for segment in lets_go if self._ends_at is None or segment <= self._ends_at]
        last_with_values = max(read, default=-1)
        self.graph.lets_go = frozenset(lets_go)
        self.graph.memos = {segment: segment < last_with_values for segment in memos if segment < last}
        nothing = (at for at, site in self.graph.sites.items() if at not in self.graph.memos and not site.replaced)
        self.graph.inert = frozenset(self._untouched).intersection(nothing)


Signature = tuple[Any, ...]


def signature_of(arguments: Any) -> Signature:
    """Rounded shapes and types of the tensors that a half is called with, whether they are contiguous and ask for gradients.

    Sizes of none and of one stay apart: whether code copies or makes a view hangs on them.
    """
    return tuple(
        [
            (
                tuple([size and 1 + (size - 1).bit_length() for size in one.shape]),
                one.is_contiguous(),
                one.dtype,
                one.requires_grad,
            )
            for one in tensors_in(arguments)
        ]
    )


MOST_SIGNATURES = 16
"""How many a half may have: sequences of ever new lengths must not pile up."""


class RecordedGraphs:
    """The recorded graphs of one engine, by what distinguishes halves and the way in which they are recorded.

    Where a half has as many as it may, the one that was used longest ago makes room.
    """

    def __init__(self) -> None:
        self._known: dict[Any, dict[Signature, RecordedGraph]] = {}
        """Of each half, the one that was used last at the end."""

    def find(self, half: Any, signature: Signature) -> RecordedGraph | None:
        known = self._known.get(half)
        if known is None or (graph := known.pop(signature, None)) is None:
            return None
        known[signature] = graph
        return graph

    def put(self, half: Any, signature: Signature, graph: RecordedGraph | None) -> None:
        """None: it is out of date."""
        known = self._known.setdefault(half, {})
        known.pop(signature, None)
        if graph is None:
            return
        if len(known) >= MOST_SIGNATURES:
            del known[next(iter(known))]
        known[signature] = graph
