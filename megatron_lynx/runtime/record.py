"""Records a half: runs it once, and drops every saved tensor that its recomputation regenerates (docs/runtime.md).

Code between sites, and recomputed sites without parameters, run under default hooks. Any other site runs without them (rule R11);
afterwards single saved tensors of its nodes become handles (`site` says which). With an offload group, kept tensors are
pushed to it, and the group decides which ones go to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from megatron_lynx.anatomy import Item
from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.frame import Frame, HalfPolicy, Handle, Memo, MicroBatch, Run, absent
from megatron_lynx.runtime.offload import OffloadGroup
from megatron_lynx.runtime.saved import Packing, View, detached, is_parameter, storage_of, tensor_of
from megatron_lynx.runtime.site import NOTHING, FirstCall, Graphs, Key, Replaced, ShortcutFinder, Site, SiteCall
from megatron_lynx.runtime.surroundings import RandomSource

GATHERED = Item("gathered latents", "code")
"""All-gathers between the sites of latent attention; always kept."""


class Observer(Protocol):
    """Compares saved tensors, and inputs that are gathered again, with the tensors of backward (`--lynx-check frames`)."""

    def wants(self, frame: Frame, offloads: bool) -> bool:
        """Return whether to observe this call of a half. `offloads`: whether some tensors may go to the host."""

    def saved(self, frame: Frame, item: str | None, segment: int, packed: Any, tensor: Tensor) -> Any:
        """Return what autograd holds for a saved tensor in place of `packed`, which `saved.tensor_of` unpacks."""

    def gathered(self, frame: Frame, item: str, segment: int, tensor: Tensor) -> Callable[[Tensor], None]:
        """Report a gathered input. Returns what is called with the gathered input of backward."""


class Recorder(Run):
    """Records one call of one half. `graphs`: of earlier calls; this one adds its own, or removes one that it did not fit.
    `in_flight`: the other micro-batches between forward and backward, if the half may fall back."""

    def __init__(
        self,
        frame: Frame,
        random: RandomSource,
        group: OffloadGroup | None = None,
        graphs: Graphs | None = None,
        in_flight: Sequence[MicroBatch] = (),
        observer: Observer | None = None,
    ) -> None:
        super().__init__(frame)
        self._group = group
        self._random = random
        self._packing: Packing
        self._graphs = {} if graphs is None else graphs
        self._in_flight = in_flight
        self._undecided = frame.policy.allowed_load is not None
        self._observer = observer
        self._fits = True
        self._call: SiteCall | None = None
        """The site whose saved tensors are being replaced."""
        self._finder: ShortcutFinder | None = None
        self._follow(frame.policy, None if group is None else group.may_go)

    def _follow(self, policy: HalfPolicy, may_go: Callable[..., bool] | None) -> None:
        self._recompute, graph = policy.recompute, self._graphs.get(policy.recompute)
        self._first: FirstCall | None = None
        if graph is None:
            self._first = FirstCall(policy.section, policy.recompute, self.frame.inputs, may_go)
            graph = self._first.graph
        self._graph = graph

    def run(self, *given: Any) -> Any:
        args, kwargs = given
        self._packing = Packing(self._pack if self._observer is None else partial(self._watched, self._pack))
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
            self._graphs[self._recompute] = self._graph
            self._drop_memos()
        if not self._fits:
            self._graphs.pop(self._recompute, None)
        self.frame.graph = self._graph
        if finder is not None:
            self.frame.shortcut = finder.steps(self._graph.lets_go)
            if self._first is not None:
                self._graph.shortcut = len(self.frame.shortcut)
        if self._group is not None and self.frame.lets_go:
            self._push_needed_by_recomputation(self._group)
        return outputs

    def keep_gathered(self, whole: Any) -> None:
        """Keep the gathered input of a recomputed up-projection of latent attention: it is small, and saves the second gather."""
        if self._observer is not None and self._item is not None and self._item == self.frame.policy.gather_site:
            self.frame.on_gathered = self._observer.gathered(self.frame, self._item, self._segment, whole)
        if self.owns_gathered:
            self.frame.gathered[self._segment] = whole.detach() if isinstance(whole, Tensor) else whole

    @property
    def owns_gathered(self) -> bool:  # type: ignore[override]
        return self._item in self._recompute and self._item in self.frame.policy.keeps_gathered

    def passes(self, site: Site) -> bool:
        """Return whether nothing of the site, nor of the code after it, is dropped or remembered."""
        segment = self._segment + site.segments
        if self._undecided or segment not in self._graph.inert:
            return False
        self._packing.turn(False)
        self._segment, self._item = segment + 1, None
        return True

    def site(self, call: SiteCall) -> Any:
        site = call.site
        if self._first is not None:
            self._first.handed(call, self._of(site), self._item)
        if site.first is not None:
            self._enter(site.first.item)
        self._enter(site.name)
        segment = self._segment
        if self._finder is not None:
            self._finder.called(call, segment)
        outputs = self._called(call)
        if self._finder is not None:
            self._finder.returned(outputs)
        if site.state is not None and self._recompute:
            self.frame.site_states[segment] = site.state.capture()  # the call does not change it
        code = site.name if site.has_next_method else self.frame.policy.section.code_behind.get(site.name, site.name)
        self._enter(code)
        self._packing.turn(code in self._recompute or self._group is not None)
        if self._first is not None and site.state is None and code not in self._recompute and self._group is None:
            self._first.untouched.append(segment)
        return outputs

    def _of(self, site: Site) -> Item:
        return self.frame.policy.section.of_name.get(site.name, GATHERED)

    def _called(self, call: SiteCall) -> Any:
        site, kept = call.site, call.site.name not in self._recompute
        if not kept and not site.owns_parameters:
            self._packing.turn(True)
            outputs = call()
            if self._first is not None:
                self._first.recomputed(call, outputs)
            return outputs
        self._packing.turn(False)
        draws = kept and site.may_draw and self.frame.draws
        before = self._random.capture() if draws else None
        outputs = call()
        behind = self._random.capture() if draws else None
        self._let_go(call, outputs)
        if kept and (self._recompute or self._undecided):
            self._remember(call, outputs, None if not draws or self._random.same(before, behind) else behind)
        elif not kept and self._first is not None:
            self._first.recomputed(call, outputs)
        return outputs

    def _let_go(self, call: SiteCall, outputs: Any) -> None:
        if self._first is not None:
            self._first.read(call, self._of(call.site), self._segment, outputs)
        site = self._graph.sites.get(self._segment, NOTHING)
        nodes = site.nodes(outputs, call.arguments)
        if nodes is None:
            self._fits = False
            return
        self._call = call
        for together in site.by_attribute:
            raws = getattr(nodes[together[0].node], together[0].slot.raws)
            for one in together:
                one.slot.among(raws).register_hooks(self._pack_of(one), tensor_of)
        self._call = None  # hooks refer back to the recorder

    def _pack_of(self, one: Replaced) -> Callable[[Tensor], Any]:
        pack: Callable[[Tensor], Any]
        if one.key is None:
            assert self._group is not None, "a graph for a half that is offloaded"
            pack = self._group.push
        elif one.argument is not None or one.part is not None:
            pack = partial(self._pack_view, one.key, one.argument)
        else:
            pack = partial(self.frame.want, one.key)
        return pack if self._observer is None else partial(self._watched, pack)

    def _pack_view(self, key: Key, at: int | None, tensor: Tensor) -> Any:
        """Pack a view of an argument; of a first part's tensor if `at` is None."""
        assert self._call is not None
        if at is not None and tensor.is_set_to(argument := self._call.arguments[at]):
            return self.frame.want(key, tensor)
        if at is None:
            self.frame.let_go_bytes -= tensor.nbytes  # counted with the whole
        elif storage_of(tensor) != storage_of(argument):
            self._fits = False
            return tensor.detach()
        self.frame.views[key] = View.of(tensor)
        return self.frame.want(key, tensor)

    def _pack(self, tensor: Tensor) -> Any:
        if is_parameter(tensor):
            return tensor
        key = (self._segment, self._ordinal)
        self._ordinal += 1
        if self._item in self._recompute:
            if self._first is not None or self._segment in self._graph.lets_go:
                return self.frame.want(key, tensor)
            self._fits = False  # memos end before this segment
        # Detach tensors that stay: an output that its own node saves would never be freed.
        return tensor.detach() if self._group is None else self._group.push(tensor)

    def _watched(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        assert self._observer is not None
        packed, item = pack(tensor), self._item
        if isinstance(packed, Tensor):
            return packed
        first = None if self._call is None else self._call.site.first
        if first is not None and isinstance(packed, Handle) and packed.key[0] != self._segment:
            item = first.item
        return self._observer.saved(self.frame, item, self._segment, packed, tensor)

    def experts_got(self, rows: int, balanced: int) -> None:
        """Decide whether a half of experts falls back: whether their first linears and activation are recomputed, too."""
        if not self._undecided:
            return
        self._undecided = False
        if too_many(self.frame, rows, balanced, self._in_flight):
            before = {segment: site for segment, site in self._graph.sites.items() if segment <= self._segment}
            self.frame.policy, self._finder = self.frame.policy.fallen_back, None
            self._follow(self.frame.policy, None)
            if self._first is not None:
                self._graph.sites.update(before)
            else:
                self._graph = replace(self._graph, sites=self._graph.sites | before)
        if self._first is None:
            self._drop_memos()

    def _remember(self, call: SiteCall, outputs: Any, random: Any) -> None:
        if self._first is None and not self._undecided:
            if self._segment not in self._graph.memos:
                return
            with_values = self._graph.memos[self._segment]
        else:
            with_values = not self._ends_values(call.site)
            if self._first is not None:
                self._first.kept(self._segment, outputs, ends_values=not with_values)
        self.frame.memos[self._segment] = Memo(map_nest(Tensor, detached if with_values else absent, outputs), random)

    def _ends_values(self, site: Site) -> bool:
        """Whether no recomputed item reads the values of this kept site's output. A recomputed dispatch reads the router's."""
        item, section = self._of(site), self.frame.policy.section
        again = (section.of_name[name] for name in self._recompute if name in section.of_name)
        read = item.role == "router" and any(recomputed.exchanges for recomputed in again)
        return site.has_next_method or (item.ends_values and not read)

    def _drop_memos(self) -> None:
        """Drop memos that no recomputation passes, and values that none reads, after a call that made all memos."""
        for segment, memo in list(self.frame.memos.items()):
            if segment not in self._graph.memos:
                del self.frame.memos[segment]
            elif not self._graph.memos[segment]:
                self.frame.memos[segment] = Memo(map_nest(Tensor, absent, memo.outputs), memo.random)

    def _push_needed_by_recomputation(self, group: OffloadGroup) -> None:
        self.frame.offloaded = True
        self.frame.inputs = group.push_all(self.frame.inputs)
        for segment, memo in self.frame.memos.items():
            self.frame.memos[segment] = Memo(group.push_all(memo.outputs), memo.random)


def too_many(frame: Frame, rows: int, balanced: int, in_flight: Iterable[MicroBatch]) -> bool:
    """Return whether a half of experts falls back: its rows exceed the plan's bytes. Counts the rows as held.

    Each rank decides for itself. Rows are added up over halves that recompute the same items, because their rows have the same
    bytes. One falls back if halves in flight exceed the plan's load on average; rows of those that fell back count in full. If a
    fallen-back half keeps the share `w` of a row's bytes, this bounds the load at `1 / w` times the plan's
    (`Predicted.moe_load_fallen_back`).
    """
    policy, micro_batch = frame.policy, frame.micro_batch
    assert policy.allowed_load is not None, f"{policy.name} never falls back"
    rule = policy.recompute
    held = [holder.rows[rule] for holder in (*in_flight, micro_batch) if rule in holder.rows]
    halves, all_rows = 1 + sum(count for count, _ in held), rows + sum(held_rows for _, held_rows in held)
    own_halves, own_rows = micro_batch.rows.get(rule, (0, 0))
    micro_batch.rows[rule] = own_halves + 1, own_rows + rows
    return all_rows > policy.allowed_load * balanced * halves
