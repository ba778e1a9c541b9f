"""The engine of one rank: hooks report Megatron's progress; it records, recomputes, and runs planned work (docs/runtime.md).

The timetable depends on the plan only (rule R1), and is equal on all ranks of a group. A task that finds nothing to do is
skipped. Work that no moment did runs on demand (rule R5), or is flushed. An engine belongs to one installation; it stores nothing
on modules (rule R13) and nothing per thread (rule R12).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.anatomy.address import RECV_BACKWARD, SEND_BACKWARD, Window, WindowAddress
from megatron_lynx.figures import InputSeen
from megatron_lynx.nest import first_in, map_nest
from megatron_lynx.runtime.device import Device, device_for
from megatron_lynx.runtime.frame import ChunkPolicy, Fed, Frame, HalfPolicy, MicroBatch, Run
from megatron_lynx.runtime.host_memory import HostLimit
from megatron_lynx.runtime.offload import Offloader, OffloadGroup
from megatron_lynx.runtime.order import Ledger, OrderOfStep, Progress, StageOrder, note
from megatron_lynx.runtime.recompute import AsRecorded, Guard, Recomputations
from megatron_lynx.runtime.record import Observer, Recorder
from megatron_lynx.runtime.refusals import FOREIGN_HOOKS, OTHER_INPUT, PARTIAL_BACKWARD
from megatron_lynx.runtime.saved import detached, storage_of, tensors_in
from megatron_lynx.runtime.site import Site, SiteCall, recorded_graphs, signature_of
from megatron_lynx.runtime.surroundings import Autocast, Context, RandomSource, Surroundings
from megatron_lynx.runtime.weight_gradients import WeightGradients
from megatron_lynx.timeline import SpanKind
from megatron_lynx.timetable import Moment, Pass, Task, Timetable


class WindowedWork:
    """A `Work` whose first wait runs a window."""

    def __init__(self, work: Any, window: Callable[[Callable[[], Any]], Any]) -> None:
        self._work = work
        self._window: Callable[[Callable[[], Any]], Any] | None = window

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        window, self._window = self._window, None
        proper = partial(self._work.wait, *args, **kwargs)
        return proper() if window is None else window(proper)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Engine(Progress):
    """All mutable state of one installation. `reduced_in_backward`: as in `WeightGradients`."""

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
        self.timetable = timetable or Timetable([()] * len(self._chunks))
        self._entered_at: Any = None
        self.observer: Observer | None = None
        self.met: InputSeen | None = None

    def begin_batch(self, order: StageOrder, *, fills: bool) -> None:
        self.ledger.begin_batch(order, fills)
        self.offloader.step_begins()
        if fills:
            self.weight_gradients.clear()

    @contextmanager
    def forward_pass(self, index: int, chunk: int, microbatches: int) -> Iterator[Callable[[Any], None]]:
        """Run a forward through one chunk, `index` of `microbatches` in the step. Call the yielded function with its output."""
        if not torch.is_grad_enabled():
            yield lambda output: None
            return
        if self.ledger.begin_forward(index, chunk, microbatches):
            self.weight_gradients.clear()  # of an abandoned step
            self.offloader.step_begins()
        with self.aborting():
            self.offloader.forward_begins(self.ledger.coming if self.ledger.before_other else None)
            yield lambda output: self.offloader.forward_ends(self.ledger.end_forward(output), output)

    @contextmanager
    def backward_pass(self, output: Any) -> Iterator[Callable[[Any], None]]:
        """Run one micro-batch's backward, from the output of its forward. Call the yielded function with the gradient of its
        input, if that is sent next."""
        micro_batch, returned = self.ledger.begin_backward(output), list[Any]()
        with self.aborting(micro_batch):
            self.offloader.backward_begins(micro_batch, self.ledger.coming)
            yield returned.append
            running, sends = self.ledger.running, first_in(Tensor, returned) is not None
            later = sends and running is not None and self._chunks[running.chunk].read_after_send
            if running is not None and self.ledger.completes_gradients and not later:
                self.weight_gradients.flush(running.chunk)
            self.offloader.settle()  # in cool-down no forward comes that would free originals whose copies are over
        self._close_backward_span()
        self.ledger.end_backward(micro_batch, sends=sends)

    @property
    def busy(self) -> bool:
        """Whether a step is in progress (rule R7)."""
        return self.scope is not None or self.ledger.busy or len(self.weight_gradients) > 0

    def abandon(self) -> None:
        self.scope = None
        self.ledger.abort()
        self.weight_gradients.clear()
        self.offloader.abandon()

    @contextmanager
    def aborting(self, backward_of: MicroBatch | None = None) -> Iterator[None]:
        """Abandon the step if an exception leaves this context. `backward_of`: the micro-batch whose backward runs, if any."""
        try:
            yield
        except BaseException as error:
            note(error, self.whereabouts(backward_of))
            self.abandon()
            raise

    def reported(self, site: Site) -> Callable[..., Any]:
        """Return a replacement for a site's code that reports its calls to the running half."""
        original = site.forward

        def call_site(*args: Any, **kwargs: Any) -> Any:
            scope = self.scope
            if scope is None:
                return original(*args, **kwargs)
            outputs = original(*args, **kwargs) if scope.passes(site) else scope.site(SiteCall(site, args, kwargs))
            if scope.frame.policy.midway == site.name and not scope.recomputes:
                node = next((tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None), None)
                if node is not None:  # backward reaches the site when this output's gradient exists
                    scope.frame.marks.append(node.register_prehook(partial(self._midway, scope.frame)))
            return outputs

        return call_site

    def half(self, policy: HalfPolicy, code: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of a layer half. Evaluation is not recorded, nor halves without planned work."""
        if not torch.is_grad_enabled():
            return code(*args, **kwargs)
        self.ledger.leave()  # a forward runs, so no backward does
        if policy.passed_over and not self.trace.runs:
            return code(*args, **kwargs)
        micro_batch = self.ledger.micro_batch_for(policy.key, policy.chunk)
        whole = micro_batch.index in self._chunks[policy.chunk].whole
        policy = policy.keeping if whole else policy
        group = None if whole or policy.stays else self.offloader.group_for(micro_batch, policy.key, (args, kwargs))
        frame = Frame(policy, micro_batch, code, self._recomputations.on_demand)
        self.ledger.keep(frame)
        begin = self.trace.begin()
        if policy.may_recompute or group is not None:
            outputs = self._record(frame, group, args, kwargs)
        else:
            outputs = self.run(Run(frame), args, kwargs)
        self.add_span("forward", frame, begin)
        if not frame.lets_go:
            frame.give_up_inputs()
        if micro_batch.group is not None:
            micro_batch.group.half_ends(policy.key, outputs, policy.ahead)
        self._mark(frame, (args, kwargs), outputs)
        return outputs

    def _record(self, frame: Frame, group: OffloadGroup | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        policy = frame.policy
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # they would see handles (rule R14)
            raise FOREIGN_HOOKS.of(policy.name)
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
            hook = output.register_hook if output.grad_fn is None else output.grad_fn.register_prehook
            frame.marks.append(hook(reached))
        hidden = first_in(Tensor, arguments) if frame.policy.below_passed_over else None
        if hidden is not None and hidden.requires_grad:
            hidden.register_hook(self._left)

    def _enter(self, frame: Frame, gradients: Any) -> None:
        if frame.policy.recompute and not torch.autograd._is_checkpoint_valid():
            raise PARTIAL_BACKWARD.of(frame.policy.name)
        self._close_backward_span()
        self.ledger.enter(frame)
        if frame.micro_batch.group is not None:
            frame.micro_batch.group.backward_reaches(frame.key)
        self._entered_at = self.trace.begin()
        self.reach(self.backward_of(frame.micro_batch), Moment("enter", frame.key), frame.micro_batch, gradients)

    def _midway(self, frame: Frame, _: Any) -> None:
        if self.ledger.entered is frame:
            self.reach(self.backward_of(frame.micro_batch), Moment("core", frame.key), frame.micro_batch)

    def _left(self, _: Tensor) -> None:
        self._close_backward_span()
        self.ledger.leave()

    def _close_backward_span(self) -> None:
        frame = self.ledger.entered
        if frame is not None:
            self.add_span("backward", frame, self._entered_at)
            frame.gathering = None
            frame.take_gathered_gradient(None)

    def window(self, *, exchange: bool = False) -> Callable[[Any], Any] | None:
        """Return the function that makes a window of the `Work` of a collective (or `exchange` of tokens) that is issued next.
        Returns None outside of halves, in halves without windows, and for windows without tasks."""
        scope = self.scope
        if scope is not None and scope.recomputes:
            return scope.window(exchange=exchange)
        frame = scope.frame if scope is not None else self.ledger.entered
        if frame is None or not (frame.policy.section.exchanges if exchange else frame.policy.section.has_windows):
            return None
        if scope is not None:
            address, through = WindowAddress("fwd", *frame.key, scope.collectives), self.timetable.forward(frame.policy.chunk)
            scope.collectives += 1
        else:
            address, through = WindowAddress("bwd", *frame.key, self.ledger.ordinal), self.backward_of(frame.micro_batch)
            self.ledger.ordinal += 1
        if address not in through.busy and not self.trace.runs:
            return None
        return lambda work: WindowedWork(work, lambda proper: self._window(through, address, frame.micro_batch, proper))

    def gathered_gradient(self, gradient: Tensor) -> tuple[Tensor, Any] | None:
        """Return (gathered gradient, its `Work`) if this gradient's gather was started before."""
        begun = None if (frame := self.in_backward_of) is None else frame.take_gathered_gradient(gradient)
        if begun is None:
            return None
        window = self.window()
        return begun.whole.view(-1, *gradient.shape[1:]), begun.work if window is None else window(begun.work)

    def receive(self, works: list[Any]) -> list[Any]:
        """Wrap the works of a pipeline exchange that receives a gradient: the first wait runs the window. Its micro-batch is
        looked up then: interleaved schedules post receives ahead of time, and wait for each before its backward."""
        pending = [True]

        def window(proper: Callable[[], Any]) -> Any:
            micro_batch = self.ledger.coming if pending else None
            pending.clear()
            if micro_batch is None:
                return proper()
            with self.aborting():
                self.offloader.gradient_awaited(micro_batch)
                through = self.timetable.receive(micro_batch.chunk)
                return self._window(through, RECV_BACKWARD, micro_batch, proper)

        return [WindowedWork(work, window) for work in works]

    def started_gather(self, output: Any) -> Any:
        """Return the `Work` that gathers into `output`, if a frame started it. It counts as a collective of the half."""
        gathering = self.gathering
        if gathering is None or (gathering[0] is not output and storage_of(gathering[0]) != storage_of(output)):
            return None
        if (frame := self.in_backward_of) is None:
            return gathering[1]
        self.ledger.ordinal += 1
        report = frame.on_gathered
        return gathering[1] if report is None else WindowedWork(gathering[1], lambda proper: (proper(), report(gathering[0]))[0])

    @property
    def gathering(self) -> tuple[Any, Any] | None:
        """(gathered input, its `Work`) of the half whose backward runs; in a recomputation only at the site that reads it."""
        running = self.scope or self.ledger.entered
        return None if running is None else running.gathering

    def _window(self, through: Pass, window: Window, micro_batch: MicroBatch, proper: Callable[[], Any]) -> Any:
        """`proper`: the wait itself."""
        kind: SpanKind = "recv" if window == RECV_BACKWARD else "window"
        begin = self.trace.begin()
        self.reach(through, Moment("in", window), micro_batch)
        waited = proper()
        if begin is not None:
            self.trace.add(kind, begin, micro_batch=micro_batch.number, window=str(window))
        self.reach(through, Moment("after", window), micro_batch)
        return waited

    def gradient_sent(self) -> None:
        """Report that the gradient of a backward's input is in flight. Weight gradients left by a chunk's last backward run."""
        sending, self.ledger.sending = self.ledger.sending, None
        if sending is None:
            return
        chunk, completes = sending
        with self.aborting():
            self.reach(self.timetable.sent(chunk), Moment("in", SEND_BACKWARD), None)
            if completes:
                self.weight_gradients.flush(chunk)

    def experts_got(self, rows: int, balanced: int) -> None:
        if (scope := self.scope) is None or not scope.recomputes:
            self.counts.expert_load = max(self.counts.expert_load, rows / balanced)
        if scope is not None:
            scope.experts_got(rows, balanced)

    def backward_of(self, micro_batch: MicroBatch) -> Pass:
        return self.timetable.backward(micro_batch.chunk)

    def reach(self, through: Pass, moment: Moment, micro_batch: MicroBatch | None, gradients: Any = None) -> None:
        """Run the tasks of a moment. `micro_batch`: None while a gradient is sent. `gradients`: at `enter`, of the output."""
        for task in through.tasks.get(moment, ()):
            if task.do == "weight_gradient":
                layer, _, name = task.linear
                self.weight_gradients.run((layer, name), str(moment.place))
                continue
            frame = self.ledger.frame_of(micro_batch, task.half) if micro_batch is not None else None
            if frame is None or not frame.lets_go:
                continue
            if task.do == "recompute":
                self._recompute(frame, task, moment)
            elif task.do == "begin":
                self._begin(frame, task, moment, gradients)
            elif frame.gathering is None:
                self._gather(frame, task, moment)

    def _recompute(self, frame: Frame, task: Task, moment: Moment) -> None:
        """At `enter`, recompute a checkpoint; the half before that feeds it is recomputed with it. In a window, recompute unless
        the gather of its input was missed."""
        if moment.at == "enter":
            if not frame.policy.feeds:
                self._recomputations.on_demand(frame)
        elif not self._recomputations.would_gather(frame, task.item):
            self._recomputations.recompute(frame, str(moment.place), task.item)
            self.counts.in_windows += frame.recomputed

    def _begin(self, frame: Frame, task: Task, moment: Moment, gradients: Any) -> None:
        """Start communication of a checkpoint. On entering its half, also gather the gradient, after the input."""
        entered = frame.key == moment.place
        if entered and not frame.policy.section.exchanges:
            window = str(WindowAddress("bwd", *frame.key, 0))
            self._recomputations.beside_gradient(frame, first_in(Tensor, gradients), window)
        else:
            self._recomputations.begin(frame, str(task.item))
            self.counts.ahead += not entered

    def _gather(self, frame: Frame, task: Task, moment: Moment) -> None:
        begin = self.trace.begin()
        self._recomputations.gather(frame)
        self.add_span("gather", frame, begin, str(moment.place))
