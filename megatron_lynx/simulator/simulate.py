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
from collections.abc import Container, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from megatron_lynx.schedule.schedule import Action, ActionKind, Phase, Schedule
from megatron_lynx.simulator.passes import NOTHING, ChunkPasses, HostCopies, HostCopy, PassKey, Pending, TimedPass
from megatron_lynx.simulator.simulation import Executed, Simulation


class Message(NamedTuple):
    """Output of a forward (or input gradient of a backward) of one micro-batch at one virtual stage."""

    kind: Literal["F", "B", "U"]
    """U: an update that all stages make together (`simulator.double_buffered`); `micro_batch` is then its batch."""
    micro_batch: int
    virtual_stage: int


class Step(NamedTuple):
    """An action of a stage, with the messages of the exchange before it. `behind`: the backward that follows a forward at once.
    `before`: the pass before; `sent`: its output."""

    action: Action
    phase: Phase
    behind: Action | None
    before: Action | None
    sent: Message | None
    received: Message | None


class Steps(NamedTuple):
    """All actions of a stage. `last`: the last pass; `sent`: its output."""

    steps: tuple[Step, ...]
    last: Action | None
    sent: Message | None
    at_once: frozenset[tuple[int, int]]
    """(micro-batch, chunk) whose own backward follows its forward at once."""


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
    order: Steps
    asked_by: Mapping[Action, Action] = field(default_factory=dict)
    """For each pass, the backward whose reload it issues. Empty if copies need not avoid messages."""
    copying: bool = False
    last: Container[Action] = ()
    """The last backward of each chunk in a step."""
    pending: list[Pending] = field(default_factory=lambda: [()])
    executed: list[Executed] = field(default_factory=list)
    copies: HostCopies = field(default_factory=HostCopies)
    ready: list[tuple[Action, HostCopy]] = field(default_factory=list)
    """Forwards whose copies wait for the next pass, because they avoid messages."""

    def of(self, action: Action) -> ChunkPasses:
        passes = self.passes[action.chunk].of(action.micro_batch)
        if passes.at_once is not None and (action.micro_batch, action.chunk) in self.order.at_once:
            return passes.at_once
        return passes

    def forward(self, action: Action, phase: Phase, behind: Action | None) -> TimedPass:
        """The forward; in the steady phase the combined schedule pairs it with the backward that follows."""
        paired = phase == "steady" and behind is not None and not _same_pass(action, behind)
        return self.timed(action, ("F", "steady" if paired else "warmup", False))

    def timed(self, action: Action, key: PassKey) -> TimedPass:
        made, self.pending[0] = self.of(action).walked(key, self.pending[0])
        return made

    @property
    def copies_may_return_s(self) -> float:
        """Start of the last backward or, before the first one, of the last forward."""
        backwards = (execution.start_s for execution in reversed(self.executed) if execution.action.kind == "B")
        forwards = (execution.start_s for execution in reversed(self.executed) if execution.action.kind == "F")
        return next(backwards, next(forwards, 0.0))


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
            RunningStage(
                number,
                passes,
                steps,
                _asked_by(order) if _avoids_messages(passes) else {},
                any(chunk.copy is not None for chunk in passes),
                self._completing(order),
            )
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
        free = 0.0
        recompute: TimedPass = NOTHING
        for step in stage.order.steps:
            action, phase = step.action, step.phase
            if action.kind == "R":
                recompute = stage.timed(action, ("R", phase, False))
                continue
            over = max(free, self._copied_s(stage, step)) if stage.asked_by else free
            ready, arrived = yield from self._exchange(stage, step, over)
            synchronised = max(arrived, self._copied_s(stage, step)) if stage.copying else arrived
            held_up_s, arrived = over - free + synchronised - arrived, synchronised
            begin = self._during_message(stage, (action, "R", phase), recompute, ready, arrived) if recompute.seconds else arrived
            free = self._execute(stage, step, (arrived, begin, held_up_s)) + self._behind_each_s
            recompute = NOTHING
        yield from self._end(stage, free)
        yield None

    def _exchange(self, stage: RunningStage, step: Step, free: float) -> Generator[Message, float, tuple[float, float]]:
        """Exchange a pass's output and the next one's input; return when the stage is free to wait, and when both are there."""
        sent, received, before = step.sent, step.received, step.before
        blocking, known = self._schedule.blocking, self._arrivals
        left = NOTHING
        if sent is not None and before is not None:
            left = self._left(stage, before)
            self._post(sent, free)
            if blocking and before.kind == step.action.kind:  # else one exchange sends and receives
                over = max(free, known[sent] if sent in known else (yield sent))
                free, left = self._during_message(stage, (before, "W", "cooldown"), left, free, over), NOTHING
        arrived = free
        if received is not None:
            if blocking:
                self._post(received, free)
            arrived = max(arrived, known[received] if received in known else (yield received))
        if sent is not None and blocking:
            arrived = max(arrived, known[sent] if sent in known else (yield sent))
        if before is not None and left.seconds:
            begun = free - self._behind_each_s
            arrived = self._during_message(stage, (before, "W", "cooldown"), left, begun, arrived)
            free = min(arrived, max(free, begun + left.seconds * self._interference))
        return free, arrived

    def _end(self, stage: RunningStage, free: float) -> Generator[Message, float, None]:
        last, sent = stage.order.last, stage.order.sent
        if last is not None and sent is not None:
            self._post(sent, free)
            left = self._left(stage, last)  # no pass waits for them
            self._during_message(stage, (last, "W", "cooldown"), left, free, free + left.seconds * self._interference)
        yield from ()

    def _left(self, stage: RunningStage, before: Action) -> TimedPass:
        """Weight gradients that a backward leaves until the gradient of its input is sent."""
        return NOTHING if before.kind != "B" else stage.timed(before, ("W", "cooldown", before in stage.last))

    def _copied_s(self, stage: RunningStage, step: Step) -> float:
        """Time at which copies issued before a blocking exchange are complete; 0 if no exchange synchronises."""
        if not self._schedule.blocking:
            return 0.0
        exchanges = step.sent is not None or step.received is not None
        return stage.copies.free_s if exchanges else 0.0

    def _during_message(
        self, stage: RunningStage, of: tuple[Action, ActionKind, Phase], work: TimedPass, free: float, arrived: float
    ) -> float:
        """Return when the next pass can begin. The message takes from `free` to `arrived`."""
        if not work.seconds:
            return arrived
        action, kind, phase = of
        exposed_s = max(0.0, work.seconds - (arrived - free) / self._interference)
        begin = arrived + exposed_s
        end = begin if exposed_s else free + work.seconds * self._interference
        late_s = min(exposed_s, work.filled_s)  # weight gradients run after recomputations
        if exposed_s:
            filled_s, hidden_s = work.filled_s - late_s, work.hidden_s - (exposed_s - late_s)
            work = replace(work, hidden_s=hidden_s, exposed_s=exposed_s - late_s, filled_s=filled_s, unfilled_s=late_s)
        stage.executed.append(Executed(Action(action.micro_batch, kind, action.chunk), phase, free, free, end, work))
        return begin

    def _execute(self, stage: RunningStage, step: Step, times: tuple[float, float, float]) -> float:
        """Return the pass's end. `times`: arrival of its messages, its start, and seconds for which its exchange waited for
        copies."""
        action, phase, behind = step[:3]
        (arrived, begin, held_up_s), passes = times, stage.passes[action.chunk].of(action.micro_batch)
        waited = self._copies_back(stage, action, passes, begin) if stage.copying else 0.0
        if action.kind == "F":
            chosen = stage.forward(action, phase, behind)
        else:
            chosen = stage.timed(action, ("B", phase, action in stage.last))
        end = begin + waited + chosen.seconds
        stage.executed.append(Executed(action, phase, arrived, begin + waited, end, chosen, waited + held_up_s))
        if passes.copy is not None and action.kind == "F" and not _same_pass(action, behind):
            if stage.asked_by:
                stage.ready.append((action, passes.copy))
            else:
                stage.copies.offload(action, end, passes.copy.out_s, passes.copy.bytes)
        return end

    def _copies_back(self, stage: RunningStage, action: Action, passes: ChunkPasses, begin: float) -> float:
        """Issue copies at the start of a pass; return the seconds for which it waits for its own."""
        comes_back = action.kind == "B" and passes.copy is not None
        may_return = stage.copies_may_return_s if comes_back else 0.0  # looks back through a whole warm-up
        for forward, copy in stage.ready:
            stage.copies.offload(forward, begin, copy.out_s, copy.bytes)
        stage.ready.clear()
        coming = stage.asked_by.get(action)
        if coming is not None and (copy_back := stage.passes[coming.chunk].of(coming.micro_batch).copy) is not None:
            stage.copies.reload(coming, begin, copy_back.back_s, copy_back.bytes)
        if not comes_back or passes.copy is None:
            return 0.0
        stage.copies.reload(action, may_return, passes.copy.back_s, passes.copy.bytes)
        return max(0.0, stage.copies.back_s(action) - begin)

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
def _steps(schedule: Schedule) -> tuple[Steps, ...]:
    return tuple(_steps_of(schedule, stage) for stage in range(schedule.pipeline))


def _steps_of(schedule: Schedule, stage: int) -> Steps:
    steps, before, sent = list[Step](), None, None
    for (action, phase), behind in zip(schedule.phases(stage), _behind(schedule.orders[stage]), strict=True):
        place, towards = action.chunk * schedule.pipeline + stage, 1 if action.kind == "F" else -1
        received = _message(schedule, action, place - towards, place) if action.is_pass else None
        steps.append(Step(action, phase, behind, before, sent, received))
        if action.is_pass:
            before, sent = action, _message(schedule, action, place, place + towards)
    own = (step.action for step in steps if step.action.kind == "F" and _same_pass(step.action, step.behind))
    return Steps(tuple(steps), before, sent, frozenset(action.virtual for action in own))


def _message(schedule: Schedule, action: Action, sender: int, receiver: int) -> Message | None:
    """The message of a pass between two virtual stages; None at the ends of the model."""
    virtual = range(schedule.pipeline * schedule.chunks)
    kind: Literal["F", "B"] = "F" if action.kind == "F" else "B"
    return Message(kind, action.micro_batch, sender) if sender in virtual and receiver in virtual else None


def _same_pass(forward: Action, behind: Action | None) -> bool:
    return behind is not None and behind.virtual == forward.virtual


def _behind(order: Sequence[Action]) -> list[Action | None]:
    behind: list[Action | None] = []
    after: Action | None = None
    for action in reversed(order):
        behind.append(after if action.kind == "F" and after is not None and after.kind == "B" else None)
        after = action if action.is_pass else after
    behind.reverse()
    return behind


def _avoids_messages(passes: Sequence[ChunkPasses]) -> bool:
    return any(chunk.copy is not None and chunk.copy.avoids_messages for chunk in passes)


def _asked_by(order: Sequence[Action]) -> dict[Action, Action]:
    """By pass, the backward whose reload it issues: the next one. The pass before the first backward issues the first reload."""
    passes = [action for action in order if action.is_pass]
    backwards = [action for action in passes if action.kind == "B"]
    before_first = passes[max(0, passes.index(backwards[0]) - 1)]
    return {before_first: backwards[0], **dict(pairwise(backwards))}
