"""Runs a schedule with costs: start, end and waits of each action, and each stage's memory.

    blocking (Megatron's 1F1B)                              overlapping (interleaved, overlap_p2p_comm)
    stage 0   F0 [send F0]  F1 [send F1, receive B0] ...    F0  F1 ...        messages leave when a pass ends, one after
    stage 1      [receive F0]  F0 [send B0, receive F1]         F0  B0 ...    another on each link; only receivers wait
                                                            between passes (without overlap_p2p_comm): each pass is followed
                                                            by an exchange as long as one message; no compute runs meanwhile

A blocking message is in flight from the moment that both sides have reached it, and blocks both until it arrives.

Each stage is a generator that yields the message it waits for and is sent its arrival, so each action is visited once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise, takewhile
from typing import Any, Literal, NamedTuple

from megatron_lynx.schedule.schedule import Action, Phase, Schedule
from megatron_lynx.simulator.passes import NOTHING, ChunkPasses, HostCopies, HostCopy, PassKey, Pending, TimedPass
from megatron_lynx.simulator.simulation import Executed, Simulation


class Message(NamedTuple):
    """Output of a forward (or input gradient of a backward) of one micro-batch at one virtual stage."""

    kind: str
    """U: an update that all stages make together (`simulator.double_buffered`); `micro_batch` is then its batch."""
    micro_batch: int
    virtual_stage: int


class Step(NamedTuple):
    """A pass of a stage, and the messages that it receives and sends."""

    action: Action
    phase: Phase
    key: PassKey
    at_once: bool
    """Whether the micro-batch's own backward follows its forward at once."""
    asks_for: Action | None
    """The backward whose copies start to come back with this pass."""
    received: Message | None
    sent: Message | None


REST = Step(Action(0, "F"), "warmup", ("F", "warmup", False), False, None, None, None)
"""Before a stage's first pass and after its last one, no message is received or sent."""


def simulate(
    schedule: Schedule,
    chunks: Sequence[Sequence[ChunkPasses]],
    p2p_s: float = 0.0,
    interference: float = 1.0,
    *,
    between_passes: bool = False,
) -> Simulation:
    """Simulate one step. `chunks` by stage and chunk; `p2p_s` is one message between neighbouring stages.

    `between_passes`: messages of a non-blocking schedule do not overlap passes. Raises ValueError if stages wait for each other
    in a ring.
    """
    return Run(schedule, chunks, p2p_s, interference, between_passes=between_passes).simulation()


@dataclass
class RunningStage:
    passes: Sequence[ChunkPasses]
    pending: Pending = ()
    executed: list[Executed] = field(default_factory=list)
    copies: HostCopies = field(default_factory=HostCopies)
    ready: list[tuple[Action, HostCopy]] = field(default_factory=list)
    """Forwards whose copies wait for the next pass, because they avoid messages."""

    @cached_property
    def avoids_messages(self) -> bool:
        return any(chunk.copy is not None and chunk.copy.avoids_messages for chunk in self.passes)

    def copy_of(self, action: Action) -> HostCopy | None:
        return self.passes[action.chunk].of(action.micro_batch).copy

    def timed(self, step: Step, key: PassKey) -> TimedPass:
        passes = self.passes[step.action.chunk].of(step.action.micro_batch, at_once=step.at_once)
        made, self.pending = passes.walked(key, self.pending)
        return made


class Run:
    """Call `simulation` once. `batch`: micro-batches of a step without flushes, whose messages are posted ahead; None: all."""

    def __init__(
        self,
        schedule: Schedule,
        chunks: Sequence[Sequence[ChunkPasses]],
        p2p_s: float,
        interference: float,
        between_passes: bool = False,
        batch: int | None = None,
    ) -> None:
        self._stages = [RunningStage(passes) for passes in chunks]
        self._steps = _steps(schedule, batch)
        self._blocking, self._pipeline, self._interference = schedule.blocking, schedule.pipeline, interference
        self._synchronises = schedule.blocking and batch is None
        """Whether exchanges end in a synchronisation."""
        between = between_passes and not schedule.blocking
        self._p2p_s, self._behind_each_s = (0.0, p2p_s) if between else (p2p_s, 0.0)
        """Seconds of a message after its pass; seconds of the exchange after each pass."""
        self._posted: dict[Message, float] = {}
        self._arrivals: dict[Message, float] = {}
        self._links: dict[tuple[int, str], float] = {}
        self._waiting: dict[Message, list[int]] = {}
        self._ready = deque(range(self._pipeline))

    def simulation(self) -> Simulation:
        walks = [self._walk(number) for number in range(self._pipeline)]
        wanted: list[Message | None] = [None] * self._pipeline
        while self._ready:
            number = self._ready.popleft()
            message = wanted[number]
            wanted[number] = message = walks[number].send(None if message is None else self._arrivals[message])
            if message in self._arrivals:
                self._ready.append(number)
            elif message is not None:
                self._waiting.setdefault(message, []).append(number)
        if any(message is not None for message in wanted):
            stuck = "; ".join(f"stage {number} waits for {message}" for number, message in enumerate(wanted) if message)
            raise ValueError(f"the stages' orders cannot be run together: {stuck}")
        return Simulation(
            tuple(tuple(stage.executed) for stage in self._stages), tuple(tuple(stage.copies.done) for stage in self._stages)
        )

    def _walk(self, number: int) -> Generator[Message | None, Any, None]:
        """Yield each message that the stage waits for, and None at its end."""
        stage, free = self._stages[number], 0.0
        for before, step in pairwise((REST, *self._steps[number], REST)):
            recompute = stage.timed(step, ("R", step.phase, False)) if step.action.kind == "B" else NOTHING
            synchronises = self._synchronises and (step.received is not None or before.sent is not None)
            over = max(free, stage.copies.free_s) if synchronises and stage.avoids_messages else free
            ready, arrived = yield from self._exchange(number, before, step, over)
            if step is not REST:
                synchronised = max(arrived, stage.copies.free_s) if synchronises else arrived
                held_up_s = over - free + synchronised - arrived
                begin = self._during_message(stage, (step, "R"), recompute, ready, synchronised)
                free = self._execute(stage, step, (synchronised, begin, held_up_s)) + self._behind_each_s
        yield None

    def _exchange(self, number: int, before: Step, step: Step, free: float) -> Generator[Message, float, tuple[float, float]]:
        """Exchange the output of the pass before and the next one's input; return when the stage is free to wait, and when both
        are there. The last output is not waited for."""
        stage, blocking, sent, received, left = self._stages[number], self._blocking, before.sent, step.received, NOTHING
        if sent is not None:
            if before.action.kind == "B":  # it may leave weight gradients until the gradient of its input is sent
                left = stage.timed(before, ("W", "cooldown", before.key[2]))
            self._post(sent, free)
            if blocking and before.action.kind == step.action.kind:  # else one exchange sends and receives
                over = max(free, (yield sent))
                free, left = self._during_message(stage, (before, "W"), left, free, over), NOTHING
        arrived = free
        if received is not None:
            if blocking:
                self._post(received, free)
            arrived = max(arrived, (yield received))
        if sent is not None and blocking and step is not REST:
            arrived = max(arrived, (yield sent))
        if left.seconds:
            begun, lasts_s = free - self._behind_each_s, left.seconds * self._interference
            arrived = self._during_message(stage, (before, "W"), left, begun, begun + lasts_s if step is REST else arrived)
            free = min(arrived, max(free, begun + lasts_s))
        return free, arrived

    def _during_message(
        self, stage: RunningStage, of: tuple[Step, Literal["R", "W"]], work: TimedPass, free: float, arrived: float
    ) -> float:
        """Return when the next pass can begin. The message takes from `free` to `arrived`."""
        if not work.seconds:
            return arrived
        step, kind = of
        exposed_s = max(0.0, work.seconds - (arrived - free) / self._interference)
        begin = arrived + exposed_s
        end = begin if exposed_s else free + work.seconds * self._interference
        late_s = min(exposed_s, work.filled_s)  # weight gradients run after recomputations
        if exposed_s:
            filled_s, hidden_s = work.filled_s - late_s, work.hidden_s - (exposed_s - late_s)
            work = replace(work, hidden_s=hidden_s, exposed_s=exposed_s - late_s, filled_s=filled_s, unfilled_s=late_s)
        phase: Phase = "cooldown" if kind == "W" else step.phase
        stage.executed.append(Executed(step.action._replace(kind=kind), phase, free, free, end, work))
        return begin

    def _execute(self, stage: RunningStage, step: Step, times: tuple[float, float, float]) -> float:
        """Return the pass's end. `times`: arrival of its messages, its start, and seconds for which its exchange waited for
        copies."""
        (arrived, begin, held_up_s), action, copies = times, step.action, stage.copies
        for forward, copy in stage.ready:
            copies.offload(forward, begin, copy.out_s, copy.bytes)
        stage.ready.clear()
        if step.asks_for is not None and (coming := stage.copy_of(step.asks_for)) is not None:
            copies.reload(step.asks_for, begin, coming.back_s, coming.bytes)
        waited = max(0.0, copies.back_s(action) - begin) if action.kind == "B" else 0.0
        chosen = stage.timed(step, step.key)
        end = begin + waited + chosen.seconds
        stage.executed.append(Executed(action, step.phase, arrived, begin + waited, end, chosen, waited + held_up_s))
        if action.kind == "F" and not step.at_once and (leaving := stage.copy_of(action)) is not None:
            if stage.avoids_messages:
                stage.ready.append((action, leaving))
            else:
                copies.offload(action, end, leaving.out_s, leaving.bytes)
        return end

    def _post(self, message: Message, time_s: float) -> None:
        """Record that one side has reached a message. A blocking message waits for the other side, others for their link."""
        if self._blocking:
            other = self._posted.pop(message, None)
            if other is None:
                self._posted[message] = time_s
                return
            arrival = max(other, time_s) + self._p2p_s
        else:
            link = (message.virtual_stage % self._pipeline, message.kind)
            arrival = max(time_s, self._links.get(link, 0.0)) + self._p2p_s
            self._links[link] = arrival
        self._arrivals[message] = arrival
        if message in self._waiting:
            self._ready.extend(self._waiting.pop(message))


@lru_cache(maxsize=8)
def _steps(schedule: Schedule, batch: int | None) -> tuple[tuple[Step, ...], ...]:
    return tuple(tuple(_steps_of(schedule, stage, batch)) for stage in range(schedule.pipeline))


def _steps_of(schedule: Schedule, stage: int, batch: int | None) -> Iterator[Step]:
    """Copies of a backward start to come back with the backward before it, of the first with the forward before it."""
    order = schedule.orders[stage]
    batch = batch or 1 + max((action.micro_batch for action in order), default=0)
    behind = {one: after for one, after in pairwise(order) if (one.kind, after.kind) == ("F", "B")}
    at_once = {forward.virtual for forward, backward in behind.items() if forward.virtual == backward.virtual}
    before_first = [*takewhile(lambda action: action.kind == "F", order)][-1:]
    asking = dict(pairwise([*before_first, *(action for action in order if action.kind == "B")]))
    last = schedule.pipeline * schedule.chunks - 1
    for action, phase in schedule.phases(stage):
        place, within = action.chunk * schedule.pipeline + stage, action.virtual in at_once
        if action.kind == "F":  # the combined schedule pairs it with the next backward
            key: PassKey = ("F", "steady" if phase == "steady" and action in behind and not within else "warmup", False)
            source, begins, ends = place - 1, place == 0, place == last
        else:
            key = ("B", phase, (action.micro_batch + 1) % batch == 0)
            source, begins, ends = place + 1, place == last, place == 0
        received = None if begins else Message(key[0], action.micro_batch, source)
        sent = None if ends else Message(key[0], action.micro_batch, place)
        yield Step(action, phase, key, within, asking.get(action), received, sent)
