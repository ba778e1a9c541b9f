"""What the first call of a half has taught, so that later calls need not look for it again.

    first call     each site's nodes are walked, every saved tensor is read and compared with what the site was called with
                   ──> a recipe: which slots of which nodes become handles, which memos remain, where anything is let go at all
    later calls    the recipe's steps lead to the nodes, whose kinds are compared; hooks go on the slots that it names
                   other kinds: that site keeps what it saved, nothing new is let go, and the half's next call teaches anew

There is a recipe for each half and for each signature of its arguments. A recipe never decides about values: the replay takes
each tensor from the slot where the record let it go. One that is out of date costs memory for one call, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lynx.runtime.saved import Slot, Step, nodes_at, tensors_in

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


class Pick(NamedTuple):
    """A saved tensor of one of a site's nodes that is not left where it is."""

    node: int
    """The node's place among the site's."""
    slot: Slot
    key: Key | None
    """Of what is let go. None: it is kept, on the device or on the host."""
    argument: int | None = None
    """Of what is let go as a view of an argument of its site: of which one."""


class Grasp(NamedTuple):
    """Picks that one attribute of one node gives at once: asking for it again makes all its tensors' wrappers again."""

    node: int
    slot: Slot
    """Of the first of them."""
    picks: tuple[Pick, ...]


@dataclass(frozen=True)
class SiteRecipe:
    """One site's."""

    picks: tuple[Pick, ...] = ()
    steps: tuple[Step, ...] = ()
    """To the nodes of the picks, from what the site returned."""
    kinds: tuple[type, ...] = ()
    """Of these nodes."""
    views: tuple[Pick, ...] = ()
    """The picks that are views of an argument."""
    grasps: tuple[Grasp, ...] = ()
    """All picks, by where they are had."""

    @classmethod
    def of(cls, walked: Sequence[tuple[Any, Step]], picks: Iterable[Pick]) -> SiteRecipe:
        """`walked`: all nodes of a call; those that lead to no pick are left out."""
        found = tuple(picks)
        needed = {pick.node for pick in found}
        for place in range(len(walked) - 1, -1, -1):  # a node comes behind the one that leads to it
            before = walked[place][1].before
            if place in needed and before is not None:
                needed.add(before)
        places = {old: new for new, old in enumerate(sorted(needed))}
        taken = [walked[old] for old in places]
        steps = (step if step.before is None else step._replace(before=places[step.before]) for _, step in taken)
        moved = tuple(pick._replace(node=places[pick.node]) for pick in found)
        views = tuple(pick for pick in moved if pick.argument is not None)
        return cls(moved, tuple(steps), tuple(type(node) for node, _ in taken), views, tuple(_grasps(moved)))

    def nodes(self, outputs: Any, arguments: Sequence[Tensor]) -> list[Any] | None:
        """Those of a call of the site that picks name; None where they are of other kinds."""
        return nodes_at(self.steps, self.kinds, outputs, arguments) if self.picks else []


def _grasps(picks: Iterable[Pick]) -> Iterator[Grasp]:
    for (node, _), together in groupby(picks, key=lambda pick: (pick.node, pick.slot.raws)):
        of_node = tuple(together)
        yield Grasp(node, of_node[0].slot, of_node)


NOTHING = SiteRecipe()
"""Of a site that was not called when the recipe was made."""


@dataclass
class HalfRecipe:
    """What one call of a half has taught. By segment."""

    sites: dict[int, SiteRecipe] = field(default_factory=dict)
    memos: dict[int, bool] = field(default_factory=dict)
    """Of the kept sites that a replay passes: whether with values."""
    inert: frozenset[int] = frozenset()
    """Sites of which nothing is let go, sent out or remembered, and neither of the code behind them."""
    lets_go: frozenset[int] = frozenset()
    """Where anything is let go. A replay needs the memos before the last of these, so elsewhere nothing may be."""
    steps: int = 0
    """How many sites lead there without the half's code; 0 where that is needed."""


Signature = tuple[Any, ...]


def signature_of(arguments: Any) -> Signature:
    """Of the tensors that a half is called with: shapes, strides, types, and whether they ask for gradients."""
    return tuple([(one.shape, one.stride(), one.dtype, one.requires_grad) for one in tensors_in(arguments)])


MOST_SIGNATURES = 16
"""Of one half. Sequences of ever new lengths must not pile up."""


class Recipes:
    """All recipes of one engine, by what distinguishes halves and the way in which they are recorded."""

    def __init__(self) -> None:
        self._known: dict[Any, dict[Signature, HalfRecipe]] = {}

    def find(self, half: Any, signature: Signature) -> HalfRecipe | None:
        known = self._known.get(half)
        return known.get(signature) if known is not None else None

    def put(self, half: Any, signature: Signature, recipe: HalfRecipe | None) -> None:
        """None: it is out of date."""
        known = self._known.setdefault(half, {})
        if recipe is None:
            known.pop(signature, None)
            return
        if len(known) >= MOST_SIGNATURES and signature not in known:
            known.clear()
        known[signature] = recipe
