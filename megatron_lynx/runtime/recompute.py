"""Recomputes a half: the same code from the same inputs, as far as needed (docs/runtime.md).

Memos of kept sites come from the record, memos of recomputed sites from an earlier partial recomputation: no site runs twice. A
recomputation stops between sites, never inside one (rule R13).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.nest import first_in, map_nest
from megatron_lynx.runtime.frame import DONE, Absent, Done, Fed, Frame, Memo, Run, UnderWay, absent
from megatron_lynx.runtime.offload import on_device
from megatron_lynx.runtime.order import Progress
from megatron_lynx.runtime.refusals import COLLECTIVE_INSIDE, OTHER_NODES
from megatron_lynx.runtime.saved import Packing, detached, is_parameter, storage_of, tensors_in
from megatron_lynx.runtime.site import NOTHING, FirstPart, Site, SiteCall
from megatron_lynx.runtime.surroundings import Context, RandomSource, drawing_from, unmarked


class _Enough(Exception):
    """Raised to stop the half's code."""


class Recomputer(Run):
    """One recomputation of one frame: of all wanted tensors, or up to the item `until`."""

    recomputes = True

    def __init__(
        self, frame: Frame, random: RandomSource, until: str | None = None, *, whole: bool = False, starts: str | None = None
    ) -> None:
        """`whole`: run to the half's end. `starts`: stop after the communication of this site."""
        super().__init__(frame)
        self._random = random
        self._until = until
        self._whole = whole
        self._starts = starts
        self._last = until is None and starts is None
        self._has_fixed_end = whole or starts is not None
        """Whether it continues without wanted tensors."""
        self.argument: Tensor | None = None
        """Input of the site `until`, or of its rest if it has a first part, once it is reached."""
        self.returned: list[Tensor] = []
        self.left: Any = None
        """Random state after a whole recomputation, if the half may draw."""
        self._site: str | None = None
        self._rows: list[weakref.ref[Tensor]] = []
        self._packing: Packing

    def _is_at(self, site: str | None) -> bool:
        return self._site is not None and self._site == site

    def window(self, *, exchange: bool) -> Callable[[Any], Any] | None:
        """Raise `RecomputeError`: recomputations do not communicate (rule R2), except those of checkpoints."""
        policy = self.frame.policy
        if not policy.checkpoint:
            raise COLLECTIVE_INSIDE.of(policy.name)
        if self.frame.gradient is not None and self._is_at(policy.gather_site):
            return self.frame.gather_gradient
        return self.leaves_under_way if self._is_at(self._starts) and exchange == policy.section.exchanges else None

    def leaves_under_way(self, work: Any) -> Done:
        assert self.frame.under_way is not None
        self.frame.under_way.works.append(work)
        return DONE

    @property
    def gathering(self) -> tuple[Any, Any] | None:  # type: ignore[override]
        kept = None if self._site is None else self.frame.gathered.get(self._segment)
        if kept is not None:
            return kept, DONE
        return self.frame.gathering if self._is_at(self.frame.policy.gather_site) else None

    def run(self, *given: Any) -> None:
        assert self.frame.inputs is not None, "a frame is recomputed once"
        args, kwargs = on_device(self.frame.inputs) if self.frame.offloaded else self.frame.inputs
        shortcut = () if self._whole or self._starts else self.frame.shortcut
        draws = self.frame.random is not None and (not shortcut or any(step.site.may_draw for step in shortcut))
        self._packing = Packing(self._collect)
        try:
            random = drawing_from(self._random, self.frame.random) if draws else nullcontext()
            with random, torch.enable_grad(), suppress(_Enough):
                if shortcut:
                    values = [*args, *kwargs.values()]
                    for step in shortcut:
                        values.append(first_in(Tensor, self.site(SiteCall(step.site, (values[step.source],), {}))))
                else:
                    outputs = self.frame.code(*args, **kwargs)
                    if self._whole:
                        self.returned = [detached(tensor) for tensor in tensors_in(outputs)]
                        self.left = self._random.capture() if draws else None
        finally:
            self._packing.turn(False)
            del self._packing  # breaks a reference cycle

    def passes(self, site: Site) -> bool:
        return False

    def site(self, call: SiteCall) -> Any:
        arguments = call.arguments
        self._packing.turn(False)
        self._enter()
        if call.site.first is not None:
            self._run_first(call.site.first, call, arguments)
            self._enter()
        self._collect_views(arguments)
        if call.site.name == self._until:
            self.argument = arguments[0].detach() if self.argument is None else self.argument
            raise _Enough
        self._stop_if_done()
        memo = self.frame.memos.pop(self._segment, None) if self._last else self.frame.memos.get(self._segment)
        outputs = self._recall(memo) if memo is not None else self._run(call.without_graph())
        if self._last and self.frame.policy.checkpoint:
            self._free_rows(call.site, arguments, outputs, recalled=memo is not None)
        self._enter()
        if call.site.name == self._starts and self.frame.under_way is not None and self.frame.under_way.works:
            raise _Enough  # its communication is in flight
        self._stop_if_done()
        if self._until is not None and self._until == self.frame.policy.section.code_behind.get(call.site.name):
            raise _Enough
        self._packing.turn(self._segment in self.frame.graph.lets_go)
        return outputs

    def _run_first(self, first: FirstPart, call: SiteCall, arguments: list[Tensor]) -> None:
        segment_keys = {key for key in self.frame.wanted if key[0] == self._segment}
        passed = self._segment + 1 in self.frame.memos
        ends_here = call.site.name == self._until
        ends_all = segment_keys == self.frame.wanted and not self._has_fixed_end
        if not ends_here and (not segment_keys or not (passed or ends_all)):
            return  # not needed, or the whole site runs
        with torch.no_grad(), call.as_recorded(self.frame.site_states.get(self._segment + 1)):
            made = first.run(arguments[0])
        for index, tensor in enumerate(made):
            if tensor is not None:
                self.frame.keep((self._segment, index), tensor)
        for one in self.frame.graph.sites.get(self._segment + 1, NOTHING).parts:
            if one.key in self.frame.wanted and one.part is not None and (whole := made[one.part]) is not None:
                self.frame.keep(one.key, self.frame.views[one.key].in_(whole))
        if ends_here:
            self.argument = made[0]
        self._stop_if_done()

    def _run(self, call: SiteCall) -> Any:
        policy = self.frame.policy
        item = policy.section.of_name.get(call.site.name)
        again = call.site.name in policy.recompute if policy.checkpoint else item is not None and not item.runs_once
        assert again, f"a recomputation of {policy.name} came to {call.site.name}"
        self._site = call.site.name
        if not call.site.owns_parameters:
            self._packing.turn(self._segment in self.frame.graph.lets_go)
            outputs = call()
            self._packing.turn(False)
        else:
            with call.as_recorded(self.frame.site_states.get(self._segment)):
                outputs = call()
            self._collect_saved(call, outputs)
        if policy.checkpoint and self._is_at(policy.gather_site):
            self.frame.gathering = None  # begun ahead for this recomputation only: backward gathers again, as in stock
        self._site = None
        if not self._last:
            random = None if self.frame.random is None else self._random.capture()
            self.frame.memos[self._segment] = Memo(map_nest(Tensor, detached, outputs), random)
        if (under_way := self.frame.under_way) is not None and self._starts is not None and not under_way.works:
            under_way.passed.add(self._segment)
        return outputs

    def _free_rows(self, site: Site, arguments: list[Tensor], outputs: Any, *, recalled: bool) -> None:
        """Free dispatched rows that were sorted into a copy: the code around references them while gradients are in flight."""
        item = self.frame.policy.section.of_name.get(site.name)
        if item is None or not item.exchanges:
            return
        if self._rows:
            used = {storage_of(one) for one in arguments}
            used -= {storage_of(one) for one in (*tensors_in(outputs), *self.frame.results.values())}
            for rows in (one() for one in self._rows):
                if rows is not None and storage_of(rows) in used:
                    rows.untyped_storage().resize_(0)
        if recalled:
            self._rows += [weakref.ref(one) for one in tensors_in(outputs) if one.dim() > 1]

    def _recall(self, memo: Memo) -> Any:
        if memo.random is not None:
            self._random.restore(memo.random)
        return map_nest(Absent, Absent.made, on_device(memo.outputs) if self.frame.offloaded else memo.outputs)

    def _collect_views(self, arguments: list[Tensor]) -> None:
        for one in self.frame.graph.sites.get(self._segment, NOTHING).views:
            assert one.key is not None
            assert one.argument is not None
            if one.key in self.frame.wanted:
                argument, view = arguments[one.argument], self.frame.views.get(one.key)
                self.frame.keep(one.key, argument if view is None else view.in_(argument))

    def _collect_saved(self, call: SiteCall, outputs: Any) -> None:
        site, wanted = self.frame.graph.sites.get(self._segment, NOTHING), self.frame.wanted
        if not any(one.key in wanted for one in site.replaced):
            return
        nodes = site.nodes(outputs, call.arguments)
        if nodes is None:
            raise OTHER_NODES.of(self.frame.policy.name, site=call.site.name)
        for together in site.by_attribute:
            saved = getattr(nodes[together[0].node], together[0].slot.tensors)
            for one in together:
                if one.key in wanted:
                    self.frame.keep(one.key, one.slot.among(saved))

    def _collect(self, tensor: Tensor) -> None:
        """Collect a tensor instead of saving it: the recomputation's graph stays empty."""
        if is_parameter(tensor):
            return
        self.frame.keep((self._segment, self._ordinal), tensor)
        self._ordinal += 1
        if self._site is None:
            self._stop_if_done()

    def _stop_if_done(self) -> None:
        if not self.frame.wanted and not self._has_fixed_end:
            raise _Enough


Guard = Callable[[], AbstractContextManager[Any]]
AsRecorded = Callable[[int], AbstractContextManager[None]]
"""Context with the weights that a micro-batch (by index) saw in its forward (`runtime.order`)."""


@dataclass(eq=False)
class Recomputations:
    """All recomputations of one engine. Each runs inside `guard`, with the recorded weights."""

    progress: Progress
    random: RandomSource
    guard: Guard
    as_recorded: AsRecorded
    surroundings: Context

    def on_demand(self, frame: Frame) -> None:
        """Recompute all missing tensors: backward waits for them."""
        self._feed(frame)
        self.recompute(frame, ON_DEMAND)
        self.progress.counts.on_demand += 1

    def beside_gradient(self, frame: Frame, gradient: Tensor | None, window: str) -> None:
        """Recompute a checkpoint, and gather the gradient of its output meanwhile, until backward's wait `window`."""
        self._feed(frame)
        frame.gradient = gradient
        self.recompute(frame, window)
        frame.gradient = None
        self.progress.counts.in_windows += 1

    def begin(self, frame: Frame, item: str) -> None:
        """Recompute a checkpoint up to this item, and leave its gather or its dispatch in flight."""
        self._feed(frame)
        with self.progress.recomputing(frame, ON_DEMAND):
            if item == frame.policy.gather_site:
                self._start_gather(frame)
            else:
                frame.under_way = UnderWay()
                self._run(frame, None, starts=item)
                assert frame.under_way.works, f"the recomputation of {frame.policy.name} communicated nothing behind {item}"

    def _feed(self, frame: Frame) -> None:
        source, frame.source = frame.source, None
        if source is None:
            return
        self._feed(source)
        with self.progress.recomputing(source, ON_DEMAND):
            recomputer = self._run(source, None, whole=True)
        self.progress.counts.on_demand += 1
        assert not source.wanted, f"the recomputation of {source.policy.name} did not regenerate {sorted(source.wanted)}"
        source.give_up_inputs()
        frame.inputs = map_nest(Fed, lambda one: recomputer.returned[one.place], frame.inputs)
        if frame.draws and frame.random is None:
            frame.random = recomputer.left

    def recompute(self, frame: Frame, window: str, until: str | None = None) -> None:
        """Recompute wanted tensors, or those before the item `until`. `window`: label for the trace."""
        with self.progress.recomputing(frame, window):
            if self.would_gather(frame, until):
                self.gather(frame)
            if frame.wanted:
                self._run(frame, until)
        if not frame.wanted:
            frame.give_up_inputs()
        elif until is None:
            raise AssertionError(f"the recomputation of {frame.policy.name} did not regenerate {sorted(frame.wanted)}")

    def would_gather(self, frame: Frame, until: str | None) -> bool:
        """Whether such a recomputation reaches a site whose input is still to be gathered. A checkpoint gathers inside."""
        site, section = frame.policy.gather_site, frame.policy.section
        if frame.policy.checkpoint:
            return False
        return site is not None and frame.gathering is None and (until is None or section.index(until) > section.index(site))

    def gather(self, frame: Frame) -> None:
        self._start_gather(frame)
        self.progress.counts.gathered += 1

    def _start_gather(self, frame: Frame) -> None:
        policy = frame.policy
        argument = self._run(frame, policy.gather_site).argument
        assert argument is not None, f"{policy.name} never reached {policy.gather_site}"
        assert policy.gather is not None, f"{policy.name} has a gather site and no way to gather"
        frame.gathering = policy.gather(argument)

    def _run(self, frame: Frame, until: str | None, *, whole: bool = False, starts: str | None = None) -> Recomputer:
        marks = () if starts else _arrived(frame)
        recomputer = Recomputer(frame, self.random, until, whole=whole, starts=starts)
        weights = self.as_recorded(frame.micro_batch.index)
        bare = bool(frame.shortcut) and not whole and not starts
        marked = () if bare and not frame.policy.checkpoint else frame.policy.marked  # a shortcut does not run the half's code
        guard = nullcontext() if bare else self.guard()
        silent = nullcontext() if bare else frame.policy.hooks.silent()
        with guard, silent, weights, unmarked(marked, marks), self.surroundings.as_captured(frame.surroundings):
            self.progress.run(recomputer)
            if starts and frame.under_way is not None:
                frame.under_way.marks = tuple(dict(vars(one)) for one in marked)
        return recomputer


def _arrived(frame: Frame) -> tuple[dict[str, Any], ...]:
    """Wait for communication of the stopped recomputation, and return its marks. Memos that it passed lose their values: code
    would write into them in place again."""
    under_way, frame.under_way = frame.under_way, None
    if under_way is None:
        return ()
    for work in under_way.works:
        work.wait()
    for segment in under_way.passed:
        memo = frame.memos[segment]
        frame.memos[segment] = Memo(map_nest(Tensor, absent, memo.outputs), memo.random)
    return under_way.marks
