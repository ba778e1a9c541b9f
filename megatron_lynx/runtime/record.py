"""Records a half: runs it once, and drops every saved tensor that its recomputation regenerates.

[1] recomputed code between sites runs under default hooks: its saved tensors become handles
[2] a recomputed site without parameters runs the same way
[3] any other site runs without default hooks (rule R11); afterwards single saved tensors of its nodes become handles:
      recomputed site   all but parameters
      kept site         those that share memory with an argument that is recomputed anyway
    The half's first call learns which ones; later calls follow its recorded graph (`recorded_graph`)
[4] outputs of a kept site are remembered if a recomputation passes it
[5] code after a kept item keeps its saved tensors, and so the input of the next site
[6] a site's first part is an item: its tensors among the site's node's become handles if it is recomputed
[7] with an offload group, kept tensors are pushed to it, and the group decides which ones go to the host
[8] a site's state between calls (FP8 scales) is captured after its call, which does not change it
[9] the gathered input of a recomputed up-projection of latent attention is kept: it is small, and saves the second gather
[10] a recomputation may need the half's first sites only (a shortcut: `site`)
[11] a half of experts that may fall back follows its rule until its experts are called. The number of rows then decides whether
     their first linears and activation are recomputed as well (`loads`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megatron_lynx.anatomy import Item
from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.frame import Frame, Memo, absent, tensor_of
from megatron_lynx.runtime.offload import OffloadGroup
from megatron_lynx.runtime.recorded_graph import NOTHING, FirstCall, RecordedGraph, Replaced, View
from megatron_lynx.runtime.run import Run
from megatron_lynx.runtime.saved import Packing, detached, is_parameter, storage_of
from megatron_lynx.runtime.site import ShortcutFinder, Site, SiteCall
from megatron_lynx.runtime.surroundings import RandomSource

GATHERED = Item("gathered latents", "code")
"""All-gathers between the sites of latent attention; always kept."""


@dataclass(frozen=True)
class FallBack:
    """Decides whether a half of experts falls back."""

    needed: Callable[[int, int], bool]
    """Called with (rows, rows under uniform routing)."""
    graph: Callable[[frozenset[str]], RecordedGraph | None]
    """Recorded graph of earlier calls that fell back, by recomputed items; None before the first."""


class Recorder(Run):
    """Records one call of one half. Without a `graph` it is the first call. `fall_back`: set if the half may fall back."""

    def __init__(
        self,
        frame: Frame,
        random: RandomSource,
        group: OffloadGroup | None = None,
        graph: RecordedGraph | None = None,
        fall_back: FallBack | None = None,
    ) -> None:
        super().__init__(frame)
        self._group = group
        self._replay = frame.policy.replay
        self._random = random
        self._packing: Packing
        self._first: FirstCall | None = None
        if graph is None:
            may_go = None if group is None else group.may_go
            self._first = FirstCall(frame.policy.section, self._replay, frame.inputs, may_go)
            graph = self._first.graph
        self._graph = graph
        self._fits = True
        self._arguments: Sequence[Tensor] = ()
        """Arguments of the site whose tensors are being replaced."""
        self._finder: ShortcutFinder | None = None
        self._fall_back = fall_back
        """None once decided, and for halves that never fall back."""

    @property
    def graph(self) -> RecordedGraph | None:
        """The graph for later calls; None if this call did not fit it."""
        return self._graph if self._fits else None

    def run(self, *given: Any) -> Any:
        args, kwargs = given
        self._packing = Packing(self._pack, tensor_of)
        try:
            self._packing.turn(self._group is not None)
            if self._first is not None or self._graph.shortcut:
                self._finder = ShortcutFinder(args, kwargs, self._graph.shortcut or None)
            outputs = self.frame.code(*args, **kwargs)
        finally:
            self._packing.turn(False)
            del self._packing  # breaks a reference cycle, which would keep the frame until the next garbage collection
            finder, self._finder = self._finder, None  # breaks a cycle
            if self._first is not None:
                self._first.normed = {}  # breaks a cycle
        if self._first is not None:
            self._first.ends({segment for segment, _ in self.frame.wanted}, self.frame.memos)
            self._drop_memos()
        self.frame.lets_go_in = self._graph.lets_go
        if finder is not None:
            self.frame.shortcut = finder.steps(self._graph.lets_go)
            if self._first is not None:
                self._graph.shortcut = len(self.frame.shortcut)
        if self._group is not None and self.frame.lets_go:
            self._push_what_replay_needs(self._group)
        return outputs

    def keep_gathered(self, whole: Any) -> None:
        """Keep the gathered input of a recomputed site if it is small. [9]"""
        if self.owns_gathered:
            self.frame.gathered[self._segment] = whole.detach() if isinstance(whole, Tensor) else whole

    @property
    def owns_gathered(self) -> bool:  # type: ignore[override]
        return self._item in self._replay and self._item in self.frame.policy.keeps_gathered

    def passes(self, site: Site) -> bool:
        """Return whether nothing of the site, nor of the code after it, is dropped or remembered."""
        segment = self._segment + site.segments
        if self._fall_back is not None or segment not in self._graph.inert:
            return False
        self._packing.turn(False)
        self._segment, self._item = segment + 1, None
        return True

    def site(self, call: SiteCall) -> Any:
        site = call.site
        if self._first is not None:
            self._first.handed(call, self._of(site), self._item)  # [5]
        if site.first is not None:
            self._enter(site.first.item)
        self._enter(site.name)
        segment = self._segment
        if self._finder is not None:
            self._finder.called(call, segment)  # [10]
        outputs = self._called(call)
        if self._finder is not None:
            self._finder.returned(outputs)
        if site.state is not None and self._replay:
            self.frame.site_states[segment] = site.state.capture()  # [8]
        code = site.name if site.goes_on else self.frame.policy.section.code_behind.get(site.name, site.name)
        self._enter(code)
        self._packing.turn(code in self._replay or self._group is not None)  # [1]
        if self._first is not None and site.state is None and code not in self._replay and self._group is None:
            self._first.untouched(segment)
        return outputs

    def _of(self, site: Site) -> Item:
        return self.frame.policy.section.of_name.get(site.name, GATHERED)

    def _called(self, call: SiteCall) -> Any:
        site, kept = call.site, call.site.name not in self._replay
        if not kept and not site.owns_parameters:
            self._packing.turn(True)
            outputs = call()  # [2]
            if self._first is not None:
                self._first.replayed(call, outputs)
            return outputs
        self._packing.turn(False)
        draws = kept and site.may_draw and self.frame.draws
        before = self._random.capture() if draws else None
        outputs = call()
        behind = self._random.capture() if draws else None
        self._let_go(call, outputs)  # [3]
        if kept and (self._replay or self._fall_back is not None):
            self._remember(call, outputs, None if not draws or self._random.same(before, behind) else behind)  # [4]
        elif not kept and self._first is not None:
            self._first.replayed(call, outputs)
        return outputs

    def _let_go(self, call: SiteCall, outputs: Any) -> None:
        """Replace saved tensors of the site's nodes by handles."""
        if self._first is not None:
            self._first.read(call, self._of(call.site), self._segment, outputs)
        site, arguments = self._graph.sites.get(self._segment, NOTHING), call.arguments
        nodes = site.nodes(outputs, arguments)
        if nodes is None:
            self._fits = False
            return
        self.frame.sites[self._segment] = site
        self._arguments = arguments
        for place, slot, together in site.by_attribute:
            raws = getattr(nodes[place], slot.raws)
            for one in together:
                one.slot.among(raws).register_hooks(*self._hooks_for(one))
        self._arguments = ()  # hooks refer back to the recorder

    def _hooks_for(self, one: Replaced) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        if one.key is None:
            assert self._group is not None, "a graph for a half that is offloaded"
            return self._group.push, tensor_of  # [7]
        if one.argument is not None:
            return partial(self._pack_view, one), tensor_of
        return partial(self.frame.want, one.key), tensor_of

    def _pack_view(self, one: Replaced, tensor: Tensor) -> Any:
        assert one.key is not None
        assert one.argument is not None
        argument = self._arguments[one.argument]
        if not tensor.is_set_to(argument):
            if storage_of(tensor) != storage_of(argument):
                self._fits = False
                return tensor.detach()
            self.frame.views[one.key] = View.of(tensor)
        return self.frame.want(one.key, tensor)

    def _pack(self, tensor: Tensor) -> Any:
        if is_parameter(tensor):
            return tensor
        key = (self._segment, self._ordinal)
        self._ordinal += 1
        if self._item in self._replay and self._may_let_go():
            return self.frame.want(key, tensor)  # [1]
        # Detach tensors that stay: an output that its own node saves would never be freed.
        return tensor.detach() if self._group is None else self._group.push(tensor)  # [7]

    def _may_let_go(self, segment: int | None = None) -> bool:
        """Whether a recomputation reaches a segment (the present one by default). A recorded graph keeps memos only as far as its
        call
        needed.
        """
        if self._first is not None or (self._segment if segment is None else segment) in self._graph.lets_go:
            return True
        self._fits = False
        return False

    def experts_got(self, rows: int, balanced: int) -> None:
        """Decide whether the half falls back. [11]"""
        decision, self._fall_back = self._fall_back, None
        if decision is None:
            return
        if not decision.needed(rows, balanced):
            if self._first is None:
                self._drop_memos()
            return
        policy = self.frame.policy = self.frame.policy.fallen_back
        self._replay, self._finder, before = policy.replay, None, self._graph
        known = decision.graph(policy.replay)
        if known is not None:
            self._first, self._graph = None, known
            self._drop_memos()
            return
        self._first = FirstCall(policy.section, policy.replay, self.frame.inputs, None)
        self._graph = self._first.going_on(before, self._segment)

    def _remember(self, call: SiteCall, outputs: Any, random: Any) -> None:
        every = self._first is not None or self._fall_back is not None
        if not every and self._segment not in self._graph.memos:
            return
        ends = self._ends_values(call.site)
        if self._first is not None:
            self._first.kept(self._segment, outputs, ends_values=ends)
        with_values = not ends and (every or self._graph.memos[self._segment])
        self.frame.memos[self._segment] = Memo(map_nest(Tensor, detached if with_values else absent, outputs), random)

    def _ends_values(self, site: Site) -> bool:
        """Whether no recomputed item reads the values of this kept site's output. A recomputed dispatch reads the router's."""
        item, section = self._of(site), self.frame.policy.section
        again = (section.of_name[name] for name in self._replay if name in section.of_name)
        read = item.role == "router" and any(each.exchanges for each in again)
        return site.goes_on or (item.ends_values and not read)

    def _drop_memos(self) -> None:
        """Drop memos that no recomputation passes, and values that none reads, after a call that made all memos."""
        for segment, memo in list(self.frame.memos.items()):
            if segment not in self._graph.memos:
                del self.frame.memos[segment]
            elif not self._graph.memos[segment]:
                self.frame.memos[segment] = Memo(map_nest(Tensor, absent, memo.outputs), memo.random)

    def _push_what_replay_needs(self, group: OffloadGroup) -> None:
        """Push the half's inputs and memos to the group."""
        self.frame.offloaded = True
        self.frame.inputs = group.push_all(self.frame.inputs)
        for segment, memo in self.frame.memos.items():
            self.frame.memos[segment] = Memo(group.push_all(memo.outputs), memo.random)
