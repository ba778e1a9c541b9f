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
from collections.abc import Container, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise, takewhile
from typing import Literal, NamedTuple

from megatron_lynx.schedule.schedule import Action, Phase, Schedule
from megatron_lynx.simulator.passes import NOTHING, ChunkPasses, HostCopies, HostCopy, PassKey, Pending, TimedPass
from megatron_lynx.simulator.simulation import Executed, Simulation


class Message(NamedTuple):
    """Output of a forward (or input gradient of a backward) of one micro-batch at one virtual stage."""

    kind: Literal["F", "B", "U"]
    """U: an update that all stages make together (`simulator.double_buffered`); `micro_batch` is then its batch."""
    micro_batch: int
    virtual_stage: int


class Step(NamedTuple):
    """An action of a stage. `paired`: a forward that the combined schedule pairs with the backward behind it. `asks_for`: the
    backward whose copies start to come back with this pass. `received` and `sent`: messages of a pass."""

    action: Action
    phase: Phase
    paired: bool
    at_once: bool
    """Whether the micro-batch's own backward follows its forward at once."""
    asks_for: Action | None
    received: Message | None
    sent: Message | None


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


@dataclass(frozen=True)
class RunningStage:
    number: int
    passes: Sequence[ChunkPasses]
    steps: Sequence[Step]
    last: Container[Action] = ()
    """The last backward of each chunk in a step."""
    pending: list[Pending] = field(default_factory=lambda: [()])
    executed: list[Executed] = field(default_factory=list)
    copies: HostCopies = field(default_factory=HostCopies)
    ready: list[tuple[Action, HostCopy]] = field(default_factory=list)
    """Forwards whose copies wait for the next pass, because they avoid messages."""

    @cached_property
    def copying(self) -> bool:
        return any(chunk.copy is not None for chunk in self.passes)

    @cached_property
    def avoids_messages(self) -> bool:
        return any(chunk.copy is not None and chunk.copy.avoids_messages for chunk in self.passes)

    def copy_of(self, action: Action) -> HostCopy | None:
        return self.passes[action.chunk].of(action.micro_batch).copy

    def timed(self, step: Step, key: PassKey) -> TimedPass:
        passes = self.passes[step.action.chunk].of(step.action.micro_batch)
        if passes.at_once is not None and step.at_once:
            passes = passes.at_once
        made, self.pending[0] = passes.walked(key, self.pending[0])
        return made


class Run:
    """Call `simulation` once."""

    def __init__(
        self,
        schedule: Schedule,
        chunks: Sequence[Sequence[ChunkPasses]],
        p2p_s: float,
        interference: float,
        between_passes: bool = False,
    ) -> None:
        self._schedule = schedule
        self._stages = [
            RunningStage(number, passes, steps, self._completing(order))
            for number, (passes, order, steps) in enumerate(zip(chunks, schedule.orders, _steps(schedule), strict=True))
        ]
        between = between_passes and not schedule.blocking
        self._p2p_s, self._behind_each_s = (0.0, p2p_s) if between else (p2p_s, 0.0)
        """Seconds of a message after its pass; seconds of the exchange after each pass."""
        self._interference = interference
        self._pipeline = schedule.pipeline
        self._posted: dict[Message, float] = {}
        self._arrivals: dict[Message, float] = {}
        self._links: dict[tuple[int, str], float] = {}
        self._waiting: dict[Message, list[int]] = {}
        self._ready: deque[int] = deque()

    def _completing(self, order: Sequence[Action]) -> frozenset[Action]:
        """Backwards after which no weight gradient is pending."""
        return frozenset({action.chunk: action for action in order if action.kind == "B"}.values())

    def simulation(self) -> Simulation:
        walks = [self._walk(stage) for stage in self._stages]
        wanted = [next(walk) for walk in walks]
        for number, message in enumerate(wanted):
            self._await(number, message)
        while self._ready:
            number = self._ready.popleft()
            message = wanted[number]
            assert message is not None
            wanted[number] = walks[number].send(self._arrivals[message])
            self._await(number, wanted[number])
        if any(message is not None for message in wanted):
            stuck = "; ".join(f"stage {number} waits for {message}" for number, message in enumerate(wanted) if message)
            raise ValueError(f"the stages' orders cannot be run together: {stuck}")
        return Simulation(
            tuple(tuple(stage.executed) for stage in self._stages), tuple(tuple(stage.copies.done) for stage in self._stages)
        )

    def _await(self, number: int, message: Message | None) -> None:
        if message is None:
            return
        if message in self._arrivals:
            self._ready.append(number)
        else:
            self._waiting.setdefault(message, []).append(number)

    def _walk(self, stage: RunningStage) -> Generator[Message | None, float, None]:
        """Yield each message that the stage waits for, and None at its end."""
        free, recompute, before = 0.0, NOTHING, None
        for step in stage.steps:
            if step.action.kind == "R":
                recompute = stage.timed(step, ("R", step.phase, False))
                continue
            over = max(free, self._copied_s(stage, before, step)) if stage.avoids_messages else free
            ready, arrived = yield from self._exchange(stage, before, step, over)
            synchronised = max(arrived, self._copied_s(stage, before, step)) if stage.copying else arrived
            held_up_s, arrived = over - free + synchronised - arrived, synchronised
            begin = self._during_message(stage, (step, "R"), recompute, ready, arrived) if recompute.seconds else arrived
            free = self._execute(stage, step, (arrived, begin, held_up_s)) + self._behind_each_s
            recompute, before = NOTHING, step
        if before is not None:
            yield from self._end(stage, before, free)
        yield None

    def _exchange(
        self, stage: RunningStage, before: Step | None, step: Step, free: float
    ) -> Generator[Message, float, tuple[float, float]]:
        """Exchange the output of the pass before and the next one's input; return when the stage is free to wait, and when both
        are there."""
        sent, received = None if before is None else before.sent, step.received
        blocking, known = self._schedule.blocking, self._arrivals
        left = NOTHING
        if sent is not None and before is not None:
            left = self._left(stage, before)
            self._post(sent, free)
            if blocking and before.action.kind == step.action.kind:  # else one exchange sends and receives
                over = max(free, known[sent] if sent in known else (yield sent))
                free, left = self._during_message(stage, (before, "W"), left, free, over), NOTHING
        arrived = free
        if received is not None:
            if blocking:
                self._post(received, free)
            arrived = max(arrived, known[received] if received in known else (yield received))
        if sent is not None and blocking:
            arrived = max(arrived, known[sent] if sent in known else (yield sent))
        if before is not None and left.seconds:
            begun = free - self._behind_each_s
            arrived = self._during_message(stage, (before, "W"), left, begun, arrived)
            free = min(arrived, max(free, begun + left.seconds * self._interference))
        return free, arrived

    def _end(self, stage: RunningStage, last: Step, free: float) -> Generator[Message, float, None]:
        if last.sent is not None:
            self._post(last.sent, free)
            left = self._left(stage, last)  # no pass waits for them
            self._during_message(stage, (last, "W"), left, free, free + left.seconds * self._interference)
        yield from ()

    def _left(self, stage: RunningStage, before: Step) -> TimedPass:
        """Weight gradients that a backward leaves until the gradient of its input is sent."""
        return NOTHING if before.action.kind != "B" else stage.timed(before, ("W", "cooldown", before.action in stage.last))

    def _copied_s(self, stage: RunningStage, before: Step | None, step: Step) -> float:
        """Time at which copies issued before a blocking exchange are complete; 0 if no exchange synchronises."""
        exchanges = step.received is not None or (before is not None and before.sent is not None)
        return stage.copies.free_s if self._schedule.blocking and exchanges else 0.0

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
        (arrived, begin, held_up_s), action, forward = times, step.action, step.action.kind == "F"
        waited = self._copies_back(stage, step, begin) if stage.copying else 0.0
        key: PassKey = ("F", "steady" if step.paired else "warmup", False) if forward else ("B", step.phase, action in stage.last)
        chosen = stage.timed(step, key)
        end = begin + waited + chosen.seconds
        stage.executed.append(Executed(action, step.phase, arrived, begin + waited, end, chosen, waited + held_up_s))
        if forward and not step.at_once and (copy := stage.copy_of(action)) is not None:
            if stage.avoids_messages:
                stage.ready.append((action, copy))
            else:
                stage.copies.offload(action, end, copy.out_s, copy.bytes)
        return end

    def _copies_back(self, stage: RunningStage, step: Step, begin: float) -> float:
        """Issue copies at the start of a pass; return the seconds for which it waits for its own."""
        for forward, copy in stage.ready:
            stage.copies.offload(forward, begin, copy.out_s, copy.bytes)
        stage.ready.clear()
        if step.asks_for is not None and (coming := stage.copy_of(step.asks_for)) is not None:
            stage.copies.reload(step.asks_for, begin, coming.back_s, coming.bytes)
        return max(0.0, stage.copies.back_s(step.action) - begin) if step.action.kind == "B" else 0.0

    def _post(self, message: Message, time_s: float) -> None:
        """Record that one side has reached a message. A blocking message waits for the other side, others for their link."""
        if self._schedule.blocking:
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
def _steps(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    return tuple(tuple(_steps_of(schedule, stage)) for stage in range(schedule.pipeline))


def _steps_of(schedule: Schedule, stage: int) -> Iterator[Step]:
    """Copies of a backward start to come back with the backward before it, of the first with the forward before it."""
    passes = [action for action in schedule.orders[stage] if action.is_pass]
    backwards = [action for action in passes if action.kind == "B"]
    behind = {one: after for one, after in pairwise(passes) if (one.kind, after.kind) == ("F", "B")}
    at_once = {forward.virtual for forward, backward in behind.items() if forward.virtual == backward.virtual}
    before_first = [*takewhile(lambda action: action.kind == "F", passes)][-1:]
    asking = dict(pairwise([*before_first, *backwards]))
    for action, phase in schedule.phases(stage):
        place, towards = action.chunk * schedule.pipeline + stage, 1 if action.kind == "F" else -1
        received, sent = (_message(schedule, action, sender, towards) for sender in (place - towards, place))
        paired = phase == "steady" and action in behind and action.virtual not in at_once
        yield Step(action, phase, paired, action.virtual in at_once, asking.get(action), received, sent)


def _message(schedule: Schedule, action: Action, sender: int, towards: int) -> Message | None:
    """The message of a pass between two virtual stages; None at the ends of the model."""
    virtual = range(schedule.pipeline * schedule.chunks)
    if not action.is_pass or sender not in virtual or sender + towards not in virtual:
        return None
    return Message("F" if action.kind == "F" else "B", action.micro_batch, sender)
