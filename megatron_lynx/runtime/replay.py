"""Replaying a half: the same code from the same inputs, as far as needed and no further.

    half inputs ──> [1] ── code [2] ── site [3] ── code [2] ── site [3] ── code ...
                                                                  └ a replay ends at a site: nothing is wanted any more [5],
                                                                    or this is the site that it was to run up to [6]

[1] random state (where the half may draw) and surroundings are what they were; gradients are on, because only then does code save
    tensors
[2] code between sites runs; where anything of what it saves is wanted, that is collected
[3] at a site, wanted arguments are collected first, then
          with a memo     it is returned, and the random state moves to where the site left it: the record made the memo of a
                          site that is kept, an earlier replay that of a site which it ran
          without one     the site runs; what it saves and is wanted is collected
[4] a site's first part runs alone where the rest of the site has a memo, is not needed, or is not to be reached
[5] when nothing is wanted any more the replay stops: between sites, never inside one (rule R13)
[6] a replay up to a site stops where that is called, and says with what; one up to the code behind a site, when the site returns.
    The sites that it ran are remembered as memos, so that the frame's next replay goes on from there and no site runs twice
[7] where the half's first sites make all that is wanted, they run without the code around them (a shortcut: `site`)
[8] a replay that is begun ahead stops behind a site whose communication it has issued and nobody has waited for; the next one of
    the frame waits for it first
[9] what a checkpoint has gathered ahead serves its replay alone: backward gathers again, as in stock, and the buffer is free
[10] rows of tokens that have travelled, and were sorted into a copy, are let go of: gradients travel beside what comes behind

A half is replayed ahead of time, by what the plan has put into a window, or when backward asks for the first tensor of it:

    a handle     ─── nothing there yet: replay(frame, "on_demand") ───> the tensor, dropped here
    a window     ─── replay(frame, window), or a part of it: replay(frame, window, until)
    behind one   ─── gather(frame): up to the site whose input is gathered; the next replay runs it with what arrived

A checkpointed half runs again where backward enters it, and what communicates inside with it. If its input is what the half
before returns, that one is run to its end first: all that it is wanted for is collected meanwhile, so that backward finds it when
it comes there. So one layer, or several, are made again from one input.

    enter mlp(4)       on_demand ──> [attention(4) whole, from its input] ──returns──> [mlp(4), as far as needed]
    enter attention(4) everything is there

What it communicates last may be under way before that, where the plan has it begin ahead:

    enter attention(5) begin ──> [attention(4) whole] ──> [mlp(4) to its dispatch] ── tokens travel ──┐
    enter mlp(4)       on_demand ─────────────────────────────────────> [wait] ──> [mlp(4), the rest] <┘

A half of experts may stop there, too, where backward enters it: the rest runs in the wait for the gradient of what experts
returned, which travels behind the dispatch:

    enter mlp(4)       begin ──> [attention(4) whole] ──> [mlp(4) to its dispatch]
    bwd.mlp.0@4        replay ──> [wait for the dispatch] ──> [mlp(4), the rest] ──> [wait for the gradient]

With sequence parallelism the input of a replayed GEMM is gathered once: the half is replayed up to that site, the gather of what
the site was called with is started, and the next replay runs the site with what arrived.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.nest import first_in, map_nest
from megatron_lynx.runtime.frame import Absent, Fed, Frame, Memo, UnderWay, absent
from megatron_lynx.runtime.offload import on_device
from megatron_lynx.runtime.progress import Progress
from megatron_lynx.runtime.recorded_graph import NOTHING
from megatron_lynx.runtime.refusals import collective_in_replay, other_nodes
from megatron_lynx.runtime.run import DONE, Done, Run
from megatron_lynx.runtime.saved import Packing, detached, is_parameter, storage_of, tensors_in
from megatron_lynx.runtime.site import FirstPart, ShortcutStep, Site, SiteCall
from megatron_lynx.runtime.surroundings import Context, RandomSource, drawing_from, unmarked


class _Enough(Exception):
    """Nothing more is needed from this half."""


class Replayer(Run):
    """One replay of one frame: of all that is wanted, or up to the item `until`."""

    replays = True

    def __init__(
        self, frame: Frame, random: RandomSource, until: str | None = None, *, whole: bool = False, starts: str | None = None
    ) -> None:
        """`whole`: it goes on to the half's end, whatever is wanted. `starts`: it stops behind this site's communication."""
        super().__init__(frame)
        self._random = random
        self._until = until
        self._whole = whole
        self._starts = starts
        self.argument: Tensor | None = None
        """What the site `until` works on: its argument, or what its first part makes of that. None where nothing was wanted any
        more before it was reached."""
        self.returned: list[Tensor] = []
        """What the half returned again, if it was run whole."""
        self.left: Any = None
        """The random state behind that, if the half may draw."""
        self._site: str | None = None
        """The site that runs now."""
        self._rows: list[weakref.ref[Tensor]] = []
        """What an earlier replay remembered of the dispatch."""
        self._packing: Packing
        """There while the half runs."""

    @property
    def in_gather_site(self) -> bool:
        """Whether the site runs whose input is gathered: the hook on that gather finds what was gathered."""
        return self._site is not None and self._site == self.frame.policy.gather_site

    def window(self, *, exchange: bool) -> Callable[[Any], Any] | None:
        """A replay must not communicate (rule R2), but that of a checkpoint, which never runs in a window, and may leave what it
        communicates under way."""
        policy = self.frame.policy
        if not policy.checkpoint:
            raise collective_in_replay(policy.name)
        if self.in_gather_site and self.frame.gradient is not None:
            return self.gathers_gradient
        return self.leaves_under_way if self.starting and exchange == policy.section.exchanges else None

    def leaves_under_way(self, work: Any) -> Done:
        """A communication was issued, for which the next replay of this frame waits; who issued it does not."""
        assert self.frame.under_way is not None
        self.frame.under_way.works.append(work)
        return DONE

    def gathers_gradient(self, work: Any) -> Any:
        """The input of the site that runs is being gathered; the gradient of what the half returned is next."""
        self.frame.gather_gradient()
        return work

    @property
    def starting(self) -> bool:
        """Whether the site runs whose communication is left under way."""
        return self._site is not None and self._site == self._starts

    @property
    def gathering(self) -> tuple[Any, Any] | None:  # type: ignore[override]
        """Of the site that runs: what it gathered in the record, where that was kept, or what is gathered for it."""
        kept = None if self._site is None else self.frame.gathered.get(self._segment)
        if kept is not None:
            return kept, DONE
        return self.frame.gathering if self.in_gather_site else None

    def run(self, *given: Any) -> None:
        """Runs the half's code from the frame's inputs, as far as needed."""
        assert self.frame.inputs is not None, "a frame is replayed once"
        args, kwargs = on_device(self.frame.inputs) if self.frame.offloaded else self.frame.inputs
        shortcut = () if self._whole or self._starts else self.frame.shortcut
        draws = self.frame.random is not None and (not shortcut or any(step.site.may_draw for step in shortcut))
        self._packing = Packing(self._collect, _never_unpacked)
        try:
            random = drawing_from(self._random, self.frame.random) if draws else nullcontext()
            with random, torch.enable_grad(), suppress(_Enough):
                if shortcut:
                    self._take_steps(shortcut, [*args, *kwargs.values()])  # [7]
                else:
                    outputs = self.frame.code(*args, **kwargs)  # [1]
                    if self._whole:
                        self.returned = [detached(tensor) for tensor in tensors_in(outputs)]
                        self.left = self._random.capture() if draws else None
        finally:
            self._packing.turn(False)
            del self._packing  # it refers back to here

    def _take_steps(self, steps: tuple[ShortcutStep, ...], values: list[Any]) -> None:
        for step in steps:
            values.append(first_in(Tensor, self.site(SiteCall(step.site, (values[step.source],), {}))))

    def passes(self, site: Site) -> bool:
        """A replay looks at each site: it may end there, and most are not to run."""
        return False

    def site(self, call: SiteCall) -> Any:
        arguments = call.arguments
        self._packing.turn(False)
        self._enter()
        if call.site.first is not None:
            self._run_first(call.site.first, call, arguments)
            self._enter()
        self._collect_views(arguments)  # [3]
        if call.site.name == self._until:  # [6]
            self.argument = arguments[0].detach() if self.argument is None else self.argument
            raise _Enough
        self._stop_if_done()
        memo = self.frame.memos.pop(self._segment, None) if self._last else self.frame.memos.get(self._segment)
        outputs = self._recall(memo) if memo is not None else self._run(call.without_graph())
        if self._last and self._dispatches(call.site):  # [10]
            if self._rows:
                self._empty(arguments, outputs)
            self._rows += [weakref.ref(one) for one in tensors_in(outputs) if one.dim() > 1] if memo is not None else []
        self._enter()
        if call.site.name == self._starts and self.frame.under_way is not None and self.frame.under_way.works:
            raise _Enough  # [8]
        self._stop_if_done()
        if self._until is not None and self._until == self.frame.policy.section.code_behind.get(call.site.name):
            raise _Enough  # [6]
        self._packing.turn(self._segment in self.frame.lets_go_in)  # [2]
        return outputs

    def _run_first(self, first: FirstPart, call: SiteCall, arguments: list[Tensor]) -> None:
        own = {key for key in self.frame.wanted if key[0] == self._segment}
        passed = self._segment + 1 in self.frame.memos
        ends_here = call.site.name == self._until
        ends_all = own == self.frame.wanted and not self._goes_on
        if not ends_here and (not own or not (passed or ends_all)):
            return  # not needed, or the whole site runs
        with torch.no_grad(), call.as_recorded(self.frame.site_states.get(self._segment + 1)):
            made = first.run(arguments[0])  # [4]
        self._keep_first(made, self._segment)
        if ends_here:
            self.argument = made[0]
        self._stop_if_done()

    def _keep_first(self, made: tuple[Tensor | None, ...], segment: int) -> None:
        for index, tensor in enumerate(made):
            if tensor is not None:
                self.frame.keep((segment, index), tensor)

    def _run(self, call: SiteCall) -> Any:
        policy = self.frame.policy
        item = policy.section.of_name.get(call.site.name)
        again = call.site.name in policy.replay if policy.checkpoint else item is not None and not item.runs_once
        assert again, f"a replay of {policy.name} came to {call.site.name}"
        self._site = call.site.name
        if not call.site.owns_parameters:
            self._packing.turn(self._segment in self.frame.lets_go_in)
            outputs = call()
            self._packing.turn(False)
        else:
            with call.as_recorded(self.frame.site_states.get(self._segment)):
                outputs = call()
            self._collect_saved(call, outputs)
        if policy.checkpoint and self.in_gather_site:
            self.frame.gathering = None  # [9]
        self._site = None
        if not self._last:  # [6] [8]
            random = None if self.frame.random is None else self._random.capture()
            self.frame.memos[self._segment] = Memo(map_nest(Tensor, detached, outputs), random)
        if (under_way := self.frame.under_way) is not None and self._starts is not None and not under_way.works:
            under_way.passed.add(self._segment)
        return outputs

    def _dispatches(self, site: Site) -> bool:
        """Whether it brings tokens to experts, or back, once more."""
        item = self.frame.policy.section.of_name.get(site.name)
        return self.frame.policy.checkpoint and item is not None and item.exchanges

    def _empty(self, arguments: list[Tensor], outputs: Any) -> None:
        """Let go of rows that an earlier replay remembered and that this one has used: the code around still has them."""
        used = {storage_of(one) for one in arguments}
        used -= {storage_of(one) for one in (*tensors_in(outputs), *self.frame.found.values())}
        for rows in (one() for one in self._rows):
            if rows is not None and storage_of(rows) in used:
                rows.untyped_storage().resize_(0)

    def _recall(self, memo: Memo) -> Any:
        if memo.random is not None:
            self._random.restore(memo.random)
        return map_nest(Absent, Absent.made, on_device(memo.outputs) if self.frame.offloaded else memo.outputs)

    def _collect_views(self, arguments: list[Tensor]) -> None:
        for one in self.frame.sites.get(self._segment, NOTHING).views:
            assert one.key is not None
            assert one.argument is not None
            if one.key in self.frame.wanted:
                argument, view = arguments[one.argument], self.frame.views.get(one.key)
                self.frame.keep(one.key, argument if view is None else view.in_(argument))

    def _collect_saved(self, call: SiteCall, outputs: Any) -> None:
        """The saved tensors that the record let go one by one, from the same slots."""
        site, wanted = self.frame.sites.get(self._segment, NOTHING), self.frame.wanted
        if not any(one.key in wanted for one in site.replaced):
            return
        nodes = site.nodes(outputs, call.arguments)
        if nodes is None:
            raise other_nodes(self.frame.policy.name, call.site.name)
        for place, slot, together in site.by_attribute:
            saved = getattr(nodes[place], slot.tensors)
            for one in together:
                if one.key in wanted:
                    self.frame.keep(one.key, one.slot.among(saved))

    def _collect(self, tensor: Tensor) -> None:
        """Stands in for autograd's saving: the replay's own graph holds nothing."""
        if is_parameter(tensor):
            return
        self.frame.keep((self._segment, self._ordinal), tensor)  # [2]
        self._ordinal += 1
        if self._site is None:
            self._stop_if_done()

    def _stop_if_done(self) -> None:
        if not self.frame.wanted and not self._goes_on:
            raise _Enough  # [5]

    @property
    def _last(self) -> bool:
        """Whether the frame is not replayed once more."""
        return self._until is None and self._starts is None

    @property
    def _goes_on(self) -> bool:
        """Whether it runs whatever is wanted."""
        return self._whole or self._starts is not None


def _never_unpacked(_: Any) -> Tensor:
    raise AssertionError("a replay's own graph is never run backward")


Guard = Callable[[], AbstractContextManager[Any]]
AsRecorded = Callable[[int], AbstractContextManager[None]]
"""From a micro-batch's index to where its weights are in place (`runtime.order`)."""


class Replays:
    """All replays of one engine. Each runs inside `guard`, with the weights as recorded."""

    def __init__(
        self, progress: Progress, random: RandomSource, guard: Guard, as_recorded: AsRecorded, surroundings: Context
    ) -> None:
        self._progress = progress
        self._random = random
        self._guard = guard
        self._as_recorded = as_recorded
        self._surroundings = surroundings

    def on_demand(self, frame: Frame) -> None:
        """Make again all that was let go and is not there yet: backward waits for it."""
        self._feed(frame)
        self.replay(frame, ON_DEMAND)
        self._progress.counts.on_demand += 1

    def beside_gradient(self, frame: Frame, gradient: Tensor | None, window: str) -> None:
        """The same for a checkpoint, beside a gather of the gradient of what the half returned, which begins behind that of its
        input. `window`: where backward waits for that gather."""
        self._feed(frame)
        frame.gradient = gradient
        self.replay(frame, window)
        frame.gradient = None
        self._progress.counts.in_windows += 1

    def begin(self, frame: Frame, item: str) -> None:
        """Run a checkpoint again as far as this item, and leave under way what that communicates: its input is gathered, or what
        it made travels."""
        self._feed(frame)
        begin, clocked = self._progress.trace.now(), self._progress.clock.begin()
        if item == frame.policy.gather_site:
            self._start_gather(frame)
        else:
            frame.under_way = UnderWay()
            self._run(frame, None, starts=item)
            assert frame.under_way.works, f"the replay of {frame.policy.name} communicated nothing behind {item}"
        self._progress.clock.end(ON_DEMAND, clocked)
        self._progress.add_span("replay", frame, ON_DEMAND, begin)

    def _feed(self, frame: Frame) -> None:
        """Have the half before run again to its end, where that makes inputs of this one."""
        source, frame.source = frame.source, None
        if source is None:
            return
        self._feed(source)
        begin, clocked = self._progress.trace.now(), self._progress.clock.begin()
        replayer = self._run(source, None, whole=True)
        self._progress.clock.end(ON_DEMAND, clocked)
        self._progress.add_span("replay", source, ON_DEMAND, begin)
        self._progress.counts.on_demand += 1
        assert not source.wanted, f"the replay of {source.policy.name} did not regenerate {sorted(source.wanted)}"
        source.give_up_inputs()
        frame.inputs = map_nest(Fed, lambda one: replayer.returned[one.place], frame.inputs)
        if frame.draws and frame.random is None:
            frame.random = replayer.left

    def replay(self, frame: Frame, window: str, until: str | None = None) -> None:
        """Make again what was let go, or the part of it that comes before the item `until`. `window`: where, for the trace."""
        begin, clocked = self._progress.trace.now(), self._progress.clock.begin()
        if self.would_gather(frame, until):
            self.gather(frame)
        if frame.wanted:
            self._run(frame, until)
        self._progress.clock.end(window, clocked)
        self._progress.add_span("replay", frame, window, begin)
        if not frame.wanted:
            frame.give_up_inputs()
        elif until is None:
            raise AssertionError(f"the replay of {frame.policy.name} did not regenerate {sorted(frame.wanted)}")

    def would_gather(self, frame: Frame, until: str | None) -> bool:
        """Whether such a replay comes to a site whose input is still to be gathered. A checkpoint gathers as a forward does."""
        site, section = frame.policy.gather_site, frame.policy.section
        if frame.policy.checkpoint:
            return False
        return site is not None and frame.gathering is None and (until is None or section.index(until) > section.index(site))

    def gather(self, frame: Frame) -> None:
        """Gather the input of a half's replayed site, once for that and for the backward behind it."""
        self._start_gather(frame)
        self._progress.counts.gathered += 1

    def _start_gather(self, frame: Frame) -> None:
        """Replay the half up to the site whose input is gathered, and start gathering it into a buffer of the frame."""
        policy = frame.policy
        argument = self._run(frame, policy.gather_site).argument
        assert argument is not None, f"{policy.name} never reached {policy.gather_site}"
        assert policy.gather is not None, f"{policy.name} has a gather site and no way to gather"
        frame.gathering = policy.gather(argument)

    def _run(self, frame: Frame, until: str | None, *, whole: bool = False, starts: str | None = None) -> Replayer:
        marks = () if starts else _arrived(frame)
        replayer = Replayer(frame, self._random, until, whole=whole, starts=starts)
        weights, marked = self._as_recorded(frame.micro_batch.index), frame.policy.marked
        bare = bool(frame.shortcut) and not whole and not starts
        guard = nullcontext() if bare else self._guard()
        silent = nullcontext() if bare else frame.policy.hooks.silent()
        with guard, silent, weights, unmarked(marked, marks), self._surroundings.as_captured(frame.surroundings):
            self._progress.run(replayer)
            if starts and frame.under_way is not None:
                frame.under_way.marks = tuple(dict(vars(one)) for one in marked)
        return replayer


def _arrived(frame: Frame) -> tuple[dict[str, Any], ...]:
    """Waits for what the replay that stopped left under way; what it had left on marked objects. What was made before only makes
    shapes from now on: code that wrote into it once would write there again."""
    under_way, frame.under_way = frame.under_way, None
    if under_way is None:
        return ()
    under_way.wait()
    for segment in under_way.passed:
        memo = frame.memos[segment]
        frame.memos[segment] = Memo(map_nest(Tensor, absent, memo.outputs), memo.random)
    return under_way.marks
