"""What a half's first call teaches about one site: which of the tensors that its nodes saved are let go, and which are kept.

saved tensor                                             becomes
a parameter, or what else outlives the call              nothing: it stays
in the memory of what the half was handed                nothing, unless that may go to the host: the frame holds it anyway
made by a replayed first part of the site                a handle, of that item                         [6]
in the memory of an argument that a replay makes again   a handle, as a view of that argument           [3]
any other, of a replayed site                            a handle
any other, where what is kept may go to the host         of which the group decides                  [7]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_lynx.runtime.recipe import Pick, SiteRecipe
from megatron_lynx.runtime.saved import saved_in, steps_between, storage_of
from megatron_lynx.runtime.site_call import SiteCall


@dataclass(frozen=True)
class Lesson:
    """One site of a half that is recorded for the first time."""

    call: SiteCall
    segment: int
    replayed: bool
    first_replayed: bool
    """Whether its first part is let go."""
    held: set[int]
    """Storages that the frame holds until its replay, on the device."""
    resident: set[int] | None
    """Storages that are held until backward anyway; None where nothing of the half is replayed, and all are."""
    may_go: Callable[[Tensor], bool] | None
    """Whether a tensor that is kept may go to the host."""
    views: int
    """How many the half has already."""

    def recipe(self, outputs: Any) -> SiteRecipe:
        """`outputs`: what the call returned."""
        walked = steps_between(outputs, self.call.arguments)
        return SiteRecipe.of(walked, self._picks([node for node, _ in walked]))

    def _picks(self, nodes: Sequence[Any]) -> Iterator[Pick]:
        arguments = self.call.arguments
        stays = {storage_of(tensor) for tensor in self.call.lasting} | self.held
        argument_at = {storage_of(tensor): index for index, tensor in reversed(list(enumerate(arguments)))}
        regenerated = self._regenerated(argument_at)
        first = self._of_first_part(nodes)
        views, own = self.views, 0
        for place, node in enumerate(nodes):
            for slot, tensor in saved_in(node):
                storage = storage_of(tensor)
                if storage in stays:
                    continue
                if storage in first:
                    yield Pick(place, slot, (self.segment - 1, first[storage]))
                elif storage in regenerated:
                    views += 1
                    yield Pick(place, slot, (self.segment, -views), argument_at[storage])
                elif self.replayed and storage not in argument_at:
                    yield Pick(place, slot, (self.segment, own))
                    own += 1
                elif self.may_go is not None and self.may_go(tensor):
                    yield Pick(place, slot, None)

    def _regenerated(self, arguments: Collection[int]) -> set[int]:
        """Storages of arguments that a replay makes again before it reaches the site."""
        if self.replayed:
            return set(arguments)
        return set() if self.resident is None else set(arguments) - self.resident

    def _of_first_part(self, nodes: Sequence[Any]) -> dict[int, int]:
        """From the storages of what a replayed first part made to the place of each among its tensors."""
        first = self.call.site.first
        if first is None or not self.first_replayed:
            return {}
        saved = enumerate(first.saved(nodes))
        return {storage_of(tensor): index for index, tensor in saved if tensor is not None}
