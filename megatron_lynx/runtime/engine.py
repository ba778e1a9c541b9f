"""The engine of one rank: hooks report Megatron's progress; it records and recomputes.

    Megatron                        engine                                     state
    ------------------------------  -----------------------------------------  ------------------------
    forward_step begins / ends      forward_pass()                             ledger
      a half is called              half(): record                             frame, owned by the graph
        a submodule is called       reported(): it passes, or site()           recorder, recomputer
        a collective is issued      waits.window(): fwd.*                      waits; the timetable says what runs in it
    messages between stages         exchange_begins()                          offloader
    receive of a gradient           waits.receive(): pipe.recv_backward        waits
    send of a gradient              gradient_sent(): pipe.send_backward        waits
    backward_step begins / ends     backward_pass(output)                      ledger
      backward reaches a half       _enter(): a checkpoint is recomputed       ledger, offloader, waits
        a collective is issued      waits.window(): bwd.*                      waits
        a saved tensor is needed    it was recomputed, or is on demand         recomputations, frame
        a weight gradient is due    weight_gradients.put_off(): delayed        weight_gradients

An engine belongs to one installation; it stores nothing on modules (rule R13) and nothing per thread (rule R12).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron_lynx.anatomy.address import SEND_BACKWARD
from megatron_lynx.figures import InputSeen
from megatron_lynx.nest import first_in, map_nest
from megatron_lynx.runtime.device import Device, device_for
from megatron_lynx.runtime.frame import Fed, Frame
from megatron_lynx.runtime.offload import HostLimit, Offloader, OffloadGroup
from megatron_lynx.runtime.order import Ledger, OrderOfStep, StageOrder
from megatron_lynx.runtime.policy import ChunkPolicy, HalfPolicy
from megatron_lynx.runtime.progress import Progress, Run
from megatron_lynx.runtime.recompute import AsRecorded, Guard, Recomputations
from megatron_lynx.runtime.record import Observer, Recorder
from megatron_lynx.runtime.recorded_graph import recorded_graphs, signature_of
from megatron_lynx.runtime.refusals import OTHER_INPUT, PARTIAL_BACKWARD, refuse_foreign_hooks
from megatron_lynx.runtime.saved import detached, tensors_in
from megatron_lynx.runtime.site import Site, SiteCall
from megatron_lynx.runtime.surroundings import Autocast, Context, RandomSource, Surroundings
from megatron_lynx.runtime.waits import Reached, Waits
from megatron_lynx.runtime.weight_gradients import WeightGradients
from megatron_lynx.timetable import Timetable


class Engine(Progress):
    """All mutable state of one installation.

    Args:
        timetable: tasks of each moment.
        chunks: policy of each chunk of the stage.
        reduced_in_backward: returns whether gradients are reduced during a chunk's last backward.
    """

    def __init__(
        self,
        timetable: Timetable | None = None,
        chunks: Sequence[ChunkPolicy] = (ChunkPolicy(),),
        *,
        order: OrderOfStep | None = None,
        random: RandomSource | None = None,
        guard: Guard = nullcontext,
        device: Device | None = None,
        offloader: Offloader | None = None,
        as_recorded: AsRecorded = lambda micro_batch: nullcontext(),
        surroundings: Sequence[Context] = (Autocast(),),
        reduced_in_backward: Callable[[], bool] = lambda: False,
    ) -> None:
        device = device or device_for(torch.device("cpu"))
        offloader = offloader or Offloader({}, device=device, limit=HostLimit(0))
        super().__init__(Ledger(order), offloader, device)
        self._chunks = tuple(chunks)
        self._random = random or RandomSource(device)
        self._surroundings = Surroundings(surroundings)
        self._recomputations = Recomputations(self, self._random, guard, as_recorded, self._surroundings)
        self._graphs = recorded_graphs()
        self.weight_gradients = WeightGradients(self, self._chunks, self._surroundings, reduced_in_backward=reduced_in_backward)
        """Interface of the hooks on weight gradients."""
        timetable = timetable or Timetable([()] * len(self._chunks))
        depths = [chunk.ahead_depth for chunk in self._chunks]
        self.waits = Waits(self, timetable, depths, self._recomputations, self.weight_gradients)
        """Interface of the hooks on communication."""
        self._entered_at: Any = None
        self.observer: Observer | None = None
        """Sees saved tensors and what backward gets instead; normally None."""
        self.met: InputSeen | None = None
        """Optional counts of the micro-batches' tokens and lengths."""

    # --- hooks on the schedule -------------------------------------------------------------------------

    def begin_batch(self, order: StageOrder, *, fills: bool) -> None:
        """Begin a batch of a schedule with overlapping batches (`runtime.order`)."""
        self.ledger.begin_batch(order, fills)
        self.offloader.step_begins()
        if fills:
            self.pending.clear()

    @contextmanager
    def forward_pass(self, index: int, chunk: int, microbatches: int) -> Iterator[Callable[[Any], None]]:
        """Run a forward through one chunk, `index` of `microbatches` in the step. Call the yielded function with its output."""
        if not torch.is_grad_enabled():
            yield lambda output: None
            return
        if self.ledger.begin_forward(index, chunk, microbatches):
            self.pending.clear()  # of an abandoned step
            self.offloader.step_begins()
        with self.aborting():
            self.offloader.forward_begins(self.ledger)
            yield lambda output: self.offloader.forward_ends(self.ledger.end_forward(output), output)

    @contextmanager
    def backward_pass(self, output: Any) -> Iterator[Callable[[Any], None]]:
        """Run one micro-batch's backward, from the output of its forward. Call the yielded function with the gradient of its
        input, if that is sent next."""
        micro_batch, returned = self.ledger.begin_backward(output), list[Any]()
        with self.aborting(micro_batch):
            self.offloader.backward_begins(micro_batch, self.ledger)
            yield returned.append
            running, sends = self.ledger.running, first_in(Tensor, returned) is not None
            later = sends and running is not None and self._chunks[running.chunk].read_after_send
            if running is not None and self.ledger.completes_gradients and not later:
                self.weight_gradients.flush(running.chunk)
            self.offloader.settle()  # in cool-down no forward comes that would free originals whose copies are over
        self._close_backward_span()
        self.ledger.end_backward(micro_batch, sends=sends)

    # --- hooks on layers -------------------------------------------------------------------------------

    def reported(self, site: Site) -> Callable[..., Any]:
        """Return a replacement for a site's code that reports its calls to the running half."""
        original = site.forward

        def call_site(*args: Any, **kwargs: Any) -> Any:
            scope = self.scope
            if scope is None:
                return original(*args, **kwargs)
            outputs = original(*args, **kwargs) if scope.passes(site) else scope.site(SiteCall(site, args, kwargs))
            if scope.frame.policy.midway == site.name and not scope.recomputes:
                self._mark_midway(scope.frame, outputs)
            return outputs

        return call_site

    def half(self, policy: HalfPolicy, code: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of a layer half. Evaluation is not recorded, nor halves without planned work."""
        if not torch.is_grad_enabled():
            return code(*args, **kwargs)
        self.ledger.leave()  # a forward runs, so no backward does
        if policy.passed_over and not self.trace.enabled:
            return code(*args, **kwargs)
        micro_batch = self.ledger.micro_batch_for(policy.key, policy.chunk)
        whole = micro_batch.index in self._chunks[policy.chunk].whole
        policy = policy.keeping if whole else policy
        group = None if whole or policy.stays else self.offloader.group_for(micro_batch, policy.key, (args, kwargs), self.ledger)
        frame = Frame(policy, micro_batch, code, self._recomputations.on_demand)
        self.ledger.keep(frame)
        begin = self.trace.now()
        if policy.may_recompute or group is not None:
            outputs = self._record(frame, group, args, kwargs)
        else:
            outputs = self.run(Run(frame), args, kwargs)
        self.add_span("forward", frame, None, begin)
        if not frame.lets_go:
            frame.give_up_inputs()
        self.offloader.half_ends(micro_batch, policy.key, outputs, policy.ahead)
        self._mark(frame, (args, kwargs), outputs)
        return outputs

    def _record(self, frame: Frame, group: OffloadGroup | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        policy = frame.policy
        refuse_foreign_hooks(policy.name)
        if policy.may_recompute:
            frame.inputs = self._held_inputs(frame, (args, kwargs))
            frame.draws = policy.may_draw()
            follows = frame.source is not None and frame.source.draws
            frame.random = self._random.capture() if frame.draws and not follows else None
            frame.surroundings = self._surroundings.capture()
        graphs = self._graphs((frame.key, group is None), signature_of((args, kwargs)))
        in_flight = [] if policy.allowed_load is None else self.ledger.in_flight_beside(frame.micro_batch)
        observer = self.observer
        if observer is not None and not observer.wants(frame, group is not None):
            observer = None
        with policy.hooks.watched(policy.name):
            outputs = self.run(Recorder(frame, self._random, group, graphs, in_flight, observer), args, kwargs)
        if policy.feeds:
            frame.returned = tuple(weakref.ref(tensor) for tensor in tensors_in(outputs))
        if frame.lets_go:
            self.counts.recorded += 1
            self.counts.fell_back += frame.policy is not policy
            self.counts.let_go_bytes += frame.let_go_bytes
        return outputs

    def _held_inputs(self, frame: Frame, given: Any) -> Any:
        """Return a half's arguments for its frame, with `Fed` for those that a recomputed half before returns."""
        fed_by = frame.policy.fed_by
        if fed_by is None:
            return map_nest(Tensor, detached, given)
        frame.source = self.ledger.frame_of(frame.micro_batch, fed_by)
        fed = {} if frame.source is None else {id(one()): place for place, one in enumerate(frame.source.returned)}
        if not any(id(tensor) in fed for tensor in tensors_in(given)):
            raise OTHER_INPUT.of(frame.policy.name)
        return map_nest(Tensor, lambda tensor: Fed(fed[id(tensor)]) if id(tensor) in fed else detached(tensor), given)

    def _mark(self, frame: Frame, arguments: Any, outputs: Any) -> None:
        """Hook on the node that made the output: backward reaches the half when the output's gradient exists. Below a half
        without hooks, a hook on the input's gradient says that backward has left this half."""
        output = next((tensor for tensor in tensors_in(outputs) if tensor.requires_grad), None)
        if output is not None:
            reached = partial(self._enter, frame)
            frame.mark = output.register_hook(reached) if output.grad_fn is None else output.grad_fn.register_prehook(reached)
        hidden = first_in(Tensor, arguments) if frame.policy.below_passed_over else None
        if hidden is not None and hidden.requires_grad:
            hidden.register_hook(self._left)

    def _mark_midway(self, frame: Frame, outputs: Any) -> None:
        """Hook on a site's output: backward reaches the site when its gradient exists."""
        node = next((tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None), None)
        if node is not None:
            frame.midway = node.register_prehook(partial(self._midway, frame))

    # --- backward ------------------------------------------------------------------------------------------------------

    def _enter(self, frame: Frame, gradients: Any) -> None:
        if frame.policy.recompute and not torch.autograd._is_checkpoint_valid():
            raise PARTIAL_BACKWARD.of(frame.policy.name)
        self._close_backward_span()
        self.ledger.enter(frame)
        self.offloader.backward_reaches(frame.micro_batch, frame.key)
        self._entered_at = self.trace.now()
        self._reach("enter", frame, gradients)

    def _midway(self, frame: Frame, _: Any) -> None:
        if self.ledger.entered is frame:
            self._reach("core", frame)

    def _reach(self, at: Literal["enter", "core"], frame: Frame, gradients: Any = None) -> None:
        through = self.waits.backward_of(frame.micro_batch)
        self.waits.reach(through, Reached(at, frame.key, frame.micro_batch, gradients))

    def _left(self, _: Tensor) -> None:
        self._close_backward_span()
        self.ledger.leave()

    def _close_backward_span(self) -> None:
        frame = self.ledger.entered
        if frame is not None:
            self.add_span("backward", frame, None, self._entered_at)
            frame.gathering = None
            frame.take_gathered_gradient(None)

    # --- further hooks on communication ------------------------------------------------------------

    def exchange_begins(self) -> None:
        """Report that messages between stages are about to be issued."""
        with self.aborting():
            self.offloader.exchange_begins()

    def gradient_sent(self) -> None:
        """Report that the gradient of a backward's input is in flight. Weight gradients left by a chunk's last backward run."""
        if (sending := self.ledger.take_sending()) is None:
            return
        chunk, completes = sending
        with self.aborting():
            self.waits.reach(self.waits.timetable.sent(chunk), Reached("in", SEND_BACKWARD, None))
            if completes:
                self.weight_gradients.flush(chunk)

    def experts_got(self, rows: int, balanced: int) -> None:
        """Report that experts of this rank are about to run on `rows` rows. `balanced`: rows under uniform routing."""
        if (scope := self.scope) is None or not scope.recomputes:
            self.counts.expert_load = max(self.counts.expert_load, rows / balanced)
        if scope is not None:
            scope.experts_got(rows, balanced)

    def gathered(self, whole: Any) -> None:
        """Report the gathered input of the half's present site."""
        if self.scope is not None:
            self.scope.keep_gathered(whole)

    @property
    def owns_gathered(self) -> bool:
        """Whether the site's gathered input needs a buffer that is not shared, because it is kept for recomputation."""
        return self.scope is not None and self.scope.owns_gathered


class Overlapping(Protocol):
    """Runs the batches of one stage without draining the pipeline between them (`double_buffered`)."""

    def few_batches(self, microbatches: int) -> StageOrder:
        """Return the passes from filling to draining, over enough batches to show all cases."""

    def as_recorded(self, micro_batch: int) -> AbstractContextManager[None]:
        """Context in which parameters have the values that this micro-batch's forward saw."""

    def check_drained(self, what: str) -> None:
        """Raise `HookRefused` if micro-batches are in flight."""

    def under(self, engine: Engine | None) -> None:
        """Report batches to this engine (or none) from now on."""
