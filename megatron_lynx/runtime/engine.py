"""The engine of one rank: hooks report what Megatron does, and it records, replays and hands back.

    Megatron                        engine                                     who keeps it
    ------------------------------  -----------------------------------------  ------------------------
    forward_step begins / ends      forward_pass()                             ledger
      a half is called              half(): record                             frame, owned by the graph
        a submodule is called       site()                                     recorder, replayer
        a collective is issued      collective(): a window, fwd.*              agenda says what runs in it
    messages between stages         exchange_begins()                          shipping
    receive of a gradient           receive(): a window, pipe.recv_backward    agenda
    backward_step begins / ends     backward_pass(output)                      ledger
      backward reaches a half       _enter()                                   ledger
        a collective is issued      collective(): a window, bwd.*              agenda
        a saved tensor is needed    _take(): replayed by now, or on demand     frame

An engine belongs to one installation; nothing is kept on modules (rule R13), nothing per thread (rule R12).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.runtime.frame import Frame, HalfPolicy, Handle, SiteCall
from megatron_lynx.runtime.ledger import Ledger, MicroBatch, Order
from megatron_lynx.runtime.offload import Offloader
from megatron_lynx.runtime.record import Passage, Recorder
from megatron_lynx.runtime.refusals import collective_in_replay, partial_backward, refuse_foreign_hooks, second_order
from megatron_lynx.runtime.replay import Replayer, present_autocast
from megatron_lynx.runtime.rng import RandomSource, TorchRandom
from megatron_lynx.runtime.saved import detached, map_nest, storage_of, tensors_in
from megatron_lynx.runtime.shipping import Shipping
from megatron_lynx.runtime.trace import Kind, Trace
from megatron_lynx.runtime.turns import Turns
from megatron_lynx.runtime.window import RECV_BACKWARD, Agenda, Phase, Place, WindowedWork, WindowKey

Guard = Callable[[], AbstractContextManager[Any]]
AsRecorded = Callable[[int], AbstractContextManager[None]]
"""From a micro-batch's index to where its weights are in place (`runtime.overlapping`)."""


@dataclass
class Counts:
    """What an engine did since they were last taken."""

    recorded: int = 0
    """Frames that let something go."""
    let_go_bytes: int = 0
    """Of tensors that were let go; those that share memory count each."""
    hidden: int = 0
    """Replays that ran inside a window."""
    on_demand: int = 0
    """Replays that backward waited for."""
    gathered: int = 0
    """Inputs gathered once."""
    live_ahead: int = 0
    """The most frames of one micro-batch that were regenerated before backward reached them."""
    offloaded_bytes: int = 0
    """Copied to the host."""
    reloaded_bytes: int = 0
    """Copied back."""
    host_bytes: int = 0
    """Host memory held for offloaded activations."""
    exposed_copy_s: float = 0.0
    """Seconds for which compute waited for copies, either way."""

    @property
    def replayed(self) -> int:
        return self.hidden + self.on_demand

    def __add__(self, later: Counts) -> Counts:
        """Of both stretches: sums, and the larger of what is held at once."""
        most = ("live_ahead", "host_bytes")
        both = {one.name: (getattr(self, one.name), getattr(later, one.name)) for one in fields(Counts)}
        return Counts(**{name: max(values) if name in most else sum(values) for name, values in both.items()})


class Engine:
    """Everything of one installation that changes while training runs."""

    def __init__(
        self,
        agendas: Sequence[Agenda] = (Agenda(),),
        *,
        order: Order | None = None,
        random: RandomSource | None = None,
        guard: Guard = nullcontext,
        device: torch.device | None = None,
        offloader: Offloader | None = None,
        as_recorded: AsRecorded = lambda micro_batch: nullcontext(),
    ) -> None:
        self.agendas = tuple(agendas)
        """By chunk."""
        self.ledger = Ledger(order)
        self.offloader = offloader
        self._shipping = Shipping(offloader, self.ledger, self.agendas)
        self.trace = Trace(device) if offloader is None else offloader.trace
        self.counts = Counts()
        self._random = random or TorchRandom()
        self._guard = guard
        self._as_recorded = as_recorded
        self._scope: Recorder | Replayer | Passage | None = None
        self._entered_at: Any = None

    @property
    def in_half(self) -> bool:
        """Whether a half runs, or its backward does."""
        return self._scope is not None or self.ledger.entered is not None

    @property
    def busy(self) -> bool:
        """Whether a step is under way (rule R7)."""
        return self._scope is not None or self.ledger.busy

    def abandon(self) -> None:
        """Forget the step under way: it failed."""
        self._scope = None
        self.ledger.abort()
        if self.offloader is not None:
            self.offloader.abandon()

    def close(self) -> None:
        """Nothing will run under this engine any more."""
        if self.offloader is not None:
            self.offloader.close()

    def take_counts(self, *, exact: bool = True) -> Counts:
        """What was done since this was last asked. On CUDA `exact` seconds wait for the device; otherwise waits that it has not
        passed yet count next time."""
        counts, self.counts = self.counts, Counts()
        if self.offloader is not None:
            counts.offloaded_bytes, counts.reloaded_bytes = self.offloader.take_bytes()
            counts.host_bytes, counts.exposed_copy_s = self.offloader.host_bytes, self.offloader.take_waited_s(exact=exact)
        return counts

    # --- what the hooks on the schedule report -------------------------------------------------------------------------

    def begin_batch(self, turns: Turns, *, fills: bool) -> None:
        """A batch of a schedule whose batches overlap begins (`runtime.overlapping`)."""
        self.ledger.begin_batch(turns, fills)

    @contextmanager
    def forward_pass(self, index: int, chunk: int, microbatches: int) -> Iterator[Callable[[Any], None]]:
        """The forward of micro-batch `index` of a step of `microbatches` through one chunk. Call what is yielded with its
        output."""
        if not torch.is_grad_enabled():
            yield lambda output: None
            return
        self.ledger.begin_forward(index, chunk, microbatches)
        with self._aborting():
            self._shipping.forward_begins()
            yield lambda output: self._shipping.forward_ends(self.ledger.end_forward(output), output)

    @contextmanager
    def backward_pass(self, output: Any) -> Iterator[None]:
        """One micro-batch's backward, from the output of its forward."""
        micro_batch = self.ledger.begin_backward(output)
        with self._aborting():
            self._shipping.backward_begins(micro_batch)
            yield
        self._close_backward_span()
        self.ledger.end_backward(micro_batch)

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    # --- what the hooks on layers report -------------------------------------------------------------------------------

    def half(self, policy: HalfPolicy, code: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a layer half. In evaluation nothing is recorded."""
        if not torch.is_grad_enabled():
            return code(*args, **kwargs)
        self.ledger.leave()  # a forward runs, so no backward does
        micro_batch = self.ledger.micro_batch_for((policy.layer, policy.half), policy.chunk)
        if micro_batch.index in self.agendas[policy.chunk].whole:
            policy = policy.keeping
        shipment = self._shipping.shipment_of(micro_batch, (args, kwargs))
        if policy.replay or shipment is not None:
            refuse_foreign_hooks(policy.name)
        frame = self._new_frame(policy, micro_batch, code, args, kwargs)
        recorded = policy.replay or shipment is not None
        scope = Recorder(frame, self._random, self._take, shipment) if recorded else Passage(frame)
        with self._inside(scope), self._span("forward", frame):
            outputs = scope.run(args, kwargs)
        self.counts.recorded += frame.lets_go
        self.counts.let_go_bytes += frame.let_go_bytes
        self._mark_entry(frame, outputs)
        return outputs

    def site(self, call: SiteCall) -> Any:
        """One submodule call; outside of a half it is only passed on."""
        return call() if self._scope is None else self._scope.site(call)

    def _new_frame(
        self,
        policy: HalfPolicy,
        micro_batch: MicroBatch,
        code: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Frame:
        frame = Frame(policy, micro_batch, code)
        if policy.replay:
            frame.inputs = map_nest(Tensor, detached, args), map_nest(Tensor, detached, kwargs)
            frame.random, frame.autocast = self._random.capture(), present_autocast()
        micro_batch.frames[frame.key] = frame
        return frame

    def _mark_entry(self, frame: Frame, outputs: Any) -> None:
        """Backward reaches a half when the gradient of its output exists: a hook on that tensor, never a view of it."""
        output = next((tensor for tensor in tensors_in(outputs) if tensor.requires_grad), None)
        if output is not None:
            output.register_hook(lambda _: self._enter(frame))
        if not frame.lets_go:
            frame.give_up_inputs()

    # --- backward ------------------------------------------------------------------------------------------------------

    def _enter(self, frame: Frame) -> None:
        if frame.policy.replay and not torch.autograd._is_checkpoint_valid():
            raise partial_backward(frame.policy.name)
        self._close_backward_span()
        self.ledger.enter(frame)
        self._entered_at = self.trace.now()

    def _close_backward_span(self) -> None:
        frame = self.ledger.entered
        if frame is not None:
            self.trace.add("backward", *frame.key, frame.micro_batch.number, None, self._entered_at)
            frame.gathering = None

    def _take(self, handle: Handle) -> Tensor:
        if torch.is_grad_enabled():
            raise second_order(handle.frame.policy.name)
        if handle.frame.lets_go:
            self._replay(handle.frame, "on_demand")
            self.counts.on_demand += 1
        return handle.take()

    # --- replay --------------------------------------------------------------------------------------------------------

    def _replay(self, frame: Frame, window: str) -> None:
        with self._span("replay", frame, window):
            if frame.policy.gather_site is not None and frame.gathering is None:
                self._gather(frame)
            self._run(Replayer(frame, self._random))
        if frame.wanted:
            raise AssertionError(f"the replay of {frame.policy.name} did not regenerate {sorted(frame.wanted)}")
        frame.give_up_inputs()

    def _gather(self, frame: Frame) -> None:
        """Run the half up to the site whose input is gathered, and start gathering it into a buffer of the frame."""
        up_to = Replayer(frame, self._random, up_to_gather=True)
        self._run(up_to)
        assert up_to.to_gather is not None, f"{frame.policy.name} never reached {frame.policy.gather_site}"
        assert frame.policy.gather is not None, f"{frame.policy.name} has a gather site and no way to gather"
        frame.gathering = frame.policy.gather(up_to.to_gather)
        self.counts.gathered += 1

    def _run(self, replayer: Replayer) -> None:
        with self._inside(replayer), self._guard(), self._as_recorded(replayer.frame.micro_batch.index):
            replayer.run()

    # --- windows -------------------------------------------------------------------------------------------------------

    def collective(self, start: Callable[[], Any]) -> Any:
        """Issue a collective of the tensor-parallel group. Its `Work` runs a window if it was issued inside a half.

        `start` issues it asynchronously. A replay must not communicate (rule R2).
        """
        if isinstance(self._scope, Replayer):
            raise collective_in_replay(self._scope.frame.policy.name)
        place, micro_batch, phase = self._place()
        work = start()
        if place is None:
            return work
        return WindowedWork(work, lambda wait: self._window(place, micro_batch, phase, wait))

    def exchange_begins(self) -> None:
        """Messages between stages are about to be issued."""
        with self._aborting():
            self._shipping.exchange_begins()

    def receive(self, works: list[Any]) -> list[Any]:
        """Works of a pipeline exchange that receives a gradient: whichever is waited for first runs the window.

        Whose window it is may be known only then: interleaved schedules ask for gradients ahead of time, and wait for each one
        right before its backward.
        """
        pending = [True]

        def window(wait: Callable[[], Any]) -> Any:
            micro_batch = self.ledger.hidden_by_receive() if pending else None
            pending.clear()
            if micro_batch is None:
                return wait()
            with self._aborting():
                self._shipping.gradient_awaited()
                return self._window(RECV_BACKWARD, micro_batch, micro_batch.phase, wait)

        return [WindowedWork(work, window) for work in works]

    def gathered_input(self) -> Tensor | None:
        """The buffer that a gather of the present site's input would fill, if its gather was started already."""
        gathering = self._gathering
        return gathering[0] if gathering is not None else None

    def served(self, output: Tensor) -> Any:
        """The `Work` that gathers into `output`, if a frame has started it. It keeps its ordinal, so that windows keep their
        names."""
        gathering = self._gathering
        if gathering is None or storage_of(gathering[0]) != storage_of(output):
            return None
        if self._scope is None:
            self.ledger.ordinal += 1
        return gathering[1]

    @property
    def _gathering(self) -> tuple[Tensor, Any] | None:
        frame = self._scope.frame if isinstance(self._scope, Replayer) and self._scope.in_gather_site else None
        if self._scope is None:
            frame = self.ledger.entered
        return frame.gathering if frame is not None else None

    def _place(self) -> tuple[Place | None, MicroBatch | None, Phase]:
        """Where the collective issued now stands, and whose replays it hides."""
        if self._scope is not None:
            layer, half = self._scope.frame.key
            place = Place("fwd", layer, half, self._scope.collectives)  # type: ignore[arg-type, union-attr]
            self._scope.collectives += 1  # type: ignore[union-attr]
            return place, self.ledger.hidden_by_forward(), "steady"
        entered = self.ledger.entered
        if entered is None:
            return None, None, "steady"
        place = Place("bwd", *entered.key, self.ledger.ordinal)  # type: ignore[arg-type]
        self.ledger.ordinal += 1
        return place, entered.micro_batch, entered.micro_batch.phase

    def _window(self, window: WindowKey, micro_batch: MicroBatch | None, phase: Phase, wait: Callable[[], Any]) -> Any:
        kind: Kind = "recv" if window == RECV_BACKWARD else "window"
        number = micro_batch.number if micro_batch else None
        with self.trace.span(kind, window=str(window), micro_batch=number):
            if micro_batch is not None:
                self._replay_ahead(window, micro_batch, phase)
            waited = wait()
        if micro_batch is not None:
            for key in self.agendas[micro_batch.chunk].gathers_behind(window):
                frame = micro_batch.frames.get(key)
                if frame is not None and frame.lets_go and frame.gathering is None:
                    with self._span("gather", frame, str(window)):
                        self._gather(frame)
        return waited

    def _replay_ahead(self, window: WindowKey, micro_batch: MicroBatch, phase: Phase) -> None:
        agenda = self.agendas[micro_batch.chunk]
        for key in agenda.replays_in(self._as_seen_by(micro_batch, window), phase):
            frame = micro_batch.frames.get(key)
            if frame is None or not frame.lets_go:
                continue
            if frame is not self.ledger.entered:
                if len(micro_batch.ahead) >= agenda.ahead_depth:
                    return  # rule R4; what is left is replayed on demand (R5)
                micro_batch.ahead.add(key)
                self.counts.live_ahead = max(self.counts.live_ahead, len(micro_batch.ahead))
            self._replay(frame, str(window))
            self.counts.hidden += 1

    def _as_seen_by(self, micro_batch: MicroBatch, window: WindowKey) -> WindowKey:
        """A forward of another chunk is known by where its layer stands in its chunk."""
        if window == RECV_BACKWARD or window.passing == "bwd":
            return window
        running, replayed = self.agendas[self.ledger.recording_chunk], self.agendas[micro_batch.chunk]
        return window._replace(layer=window.layer - running.first_layer + replayed.first_layer)

    # --- small things --------------------------------------------------------------------------------------------------

    @contextmanager
    def _inside(self, scope: Recorder | Replayer | Passage) -> Iterator[None]:
        outer, self._scope = self._scope, scope
        try:
            yield
        finally:
            self._scope = outer

    def _span(self, kind: Any, frame: Frame, window: str | None = None) -> AbstractContextManager[None]:
        return self.trace.span(kind, *frame.key, frame.micro_batch.number, window)
