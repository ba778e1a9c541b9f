"""Result of a simulated step: start and end of each action, and each stage's figures.

stage   ├─F─┤   wait   ├──B──┤        wait        ├──B──┤        bubble  = everything but passes and exposed recomputations
                └R┘ hidden           └───R──┤exposed                    (waits, messages, the end of the step)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.cost.host import HostLoad
from megatron_lynx.schedule.schedule import Action, Phase
from megatron_lynx.simulator.copies import Copied
from megatron_lynx.simulator.passes import TimedPass
from megatron_lynx.timeline import FLUSHED, MemoryCurve, Span, Timeline, curve_of_parts


class Executed(NamedTuple):
    """One executed action. Seconds from the beginning of the step."""

    action: Action
    phase: Phase
    arrived_s: float
    """Time at which its stage was free and its message had arrived."""
    start_s: float
    end_s: float
    content: TimedPass
    copy_wait_s: float = 0.0


Placed = TypeVar("Placed", Executed, Copied)


class Repeated(NamedTuple):
    """The actions of `group` micro-batches that run `times` more times in a step, every `period_s`."""

    times: int
    group: int
    period_s: float
    places: tuple[range, ...]

    def later(self, each: Placed, times: int) -> Placed:
        """Return an action or a copy, `times` groups later."""
        action, more_s = each.action, times * self.period_s
        moved = {name: getattr(each, name) + more_s for name in each._fields if name in ("arrived_s", "start_s", "end_s")}
        return each._replace(action=action._replace(micro_batch=action.micro_batch + times * self.group), **moved)


@dataclass(frozen=True)
class Simulation:
    """One simulated step, by stage. `executed` and `copied` leave out what is `repeated`."""

    executed: tuple[tuple[Executed, ...], ...]
    copied: tuple[tuple[Copied, ...], ...]
    repeated: Repeated | None = field(default=None, kw_only=True)

    @cached_property
    def step_s(self) -> float:
        return max((each.end_s for stage in self.executed for each in stage[-1:]), default=0.0) + self._repeated_s

    @property
    def _repeated_s(self) -> float:
        return 0.0 if self.repeated is None else self.repeated.times * self.repeated.period_s

    def whole(self) -> Simulation:
        """Return the simulation with all actions and copies."""
        if self.repeated is None:
            return self
        stages = range(len(self.executed))
        executed, copied = tuple(map(self._all_executed, stages)), tuple(map(self._all_copied, stages))
        return replace(self, executed=executed, copied=copied, repeated=None)

    def _all_executed(self, stage: int) -> tuple[Executed, ...]:
        assert self.repeated is not None
        own, place, times = self.executed[stage], self.repeated.places[stage], self.repeated.times
        again = (self.repeated.later(each, number) for number in range(1, times + 1) for each in own[place.start : place.stop])
        return (*own[: place.stop], *again, *(self.repeated.later(each, times) for each in own[place.stop :]))

    def _all_copied(self, stage: int) -> tuple[Copied, ...]:
        assert self.repeated is not None
        at = {each.action: number for number, each in enumerate(self.executed[stage])}
        place, times, copied = self.repeated.places[stage], self.repeated.times, list[Copied]()
        for copy in self.copied[stage]:
            first = times if at[copy.action] >= place.stop else 0
            last = times if at[copy.action] >= place.start else 0
            copied += (self.repeated.later(copy, number) for number in range(first, last + 1))
        return tuple(sorted(copied, key=lambda copy: copy.start_s))

    def times(self, stage: int) -> Sequence[int]:
        """Return how often each executed action of a stage counts in the step."""
        if self.repeated is None:
            return [1] * len(self.executed[stage])
        place = self.repeated.places[stage]
        return [1 + self.repeated.times if at in place else 1 for at in range(len(self.executed[stage]))]

    def _sum(self, stage: int, seconds: Callable[[Executed], float]) -> float:
        return sum([times * seconds(each) for each, times in zip(self.executed[stage], self.times(stage), strict=True)])

    def busy_s(self, stage: int) -> float:
        """Seconds of passes, including tensor-parallel waits, and of work in a receive that delays a pass."""
        return self._sum(stage, _busy_s)

    def bubble_s(self, stage: int) -> float:
        """Seconds without a pass or a wait for a copy; includes hidden recomputation."""
        return self.step_s - self.busy_s(stage) - self.exposed_copy_s(stage)

    def exposed_copy_s(self, stage: int) -> float:
        return self._sum(stage, lambda each: each.copy_wait_s + each.content.copy_wait_s)

    def copies(self, stage: int) -> bool:
        spans = (span for each in self.executed[stage] for span in each.content.spans)
        return bool(self.copied[stage]) or any(span.kind == "offload" for span in spans)

    def exposed_replay_s(self, stage: int) -> float:
        return self._sum(stage, lambda each: each.content.exposed_s)

    def hidden_replay_s(self, stage: int) -> float:
        return self._sum(stage, lambda each: each.content.hidden_s)

    def filled_s(self, stage: int) -> float:
        """Seconds of delayed weight gradients inside waits."""
        return self._sum(stage, lambda each: each.content.filled_s)

    def unfilled_s(self, stage: int) -> float:
        """Seconds of exposed delayed weight gradients."""
        return self._sum(stage, lambda each: each.content.unfilled_s)

    def host_s(self, stage: int) -> float:
        """Seconds in which the host issues the passes; 0 if unknown."""
        return self._sum(stage, lambda each: each.content.host_s)

    def host_late_s(self, stage: int) -> float:
        """Seconds added to passes that are host-bound."""
        return self._sum(stage, lambda each: each.content.host_late_s)

    @cached_property
    def host_bound(self) -> tuple[HostLoad, ...]:
        """Host-bound stages, with host and device seconds of their passes."""
        late = {stage: self.host_late_s(stage) for stage in range(len(self.executed))}
        return tuple(
            HostLoad(stage, self.host_s(stage), self.busy_s(stage) - late_s) for stage, late_s in late.items() if late_s > 0
        )

    def replays_of(self, stage: int, chunk: int) -> tuple[float, float]:
        """Seconds of one chunk's recomputations: hidden, exposed. A forward hides those of the next backward."""
        if stage not in self._backward_actions:
            self._backward_actions[stage] = _backward_actions(self.executed[stage])
        both = zip(self.executed[stage], self._backward_actions[stage], self.times(stage), strict=True)
        own = [(each.content, times) for each, action, times in both if action.chunk == chunk]
        return sum([times * one.hidden_s for one, times in own]), sum([times * one.exposed_s for one, times in own])

    def weight_gradients_of(self, stage: int, chunk: int) -> tuple[float, float]:
        """Seconds of delayed weight gradients in one chunk's passes: hidden, exposed."""
        both = zip(self.executed[stage], self.times(stage), strict=True)
        own = [(each.content, times) for each, times in both if each.action.chunk == chunk]
        return sum([times * one.filled_s for one, times in own]), sum([times * one.unfilled_s for one, times in own])

    def holding(self, stage: int) -> tuple[Executed, ...]:
        """Actions of a stage, at the times of its `memory`."""
        return self.executed[stage]

    def memory(self, stage: int) -> MemoryCurve:
        """Activation bytes of the stage's layers over time."""
        if stage not in self._curves:
            self._curves[stage] = self._curve(stage)
        return self._curves[stage]

    @cached_property
    def _curves(self) -> dict[int, MemoryCurve]:
        return {}

    @cached_property
    def _backward_actions(self) -> dict[int, list[Action]]:
        return {}

    def turns(self, stage: int) -> Sequence[tuple[Executed, Executed]]:
        """Each backward followed by a forward, with that forward."""
        if stage not in self._turns:
            passes = [each for each in self.executed[stage] if each.action.kind != "R"]
            self._turns[stage] = [pair for pair in pairwise(passes) if (pair[0].action.kind, pair[1].action.kind) == ("B", "F")]
        return self._turns[stage]

    @cached_property
    def _turns(self) -> dict[int, list[tuple[Executed, Executed]]]:
        return {}

    def _curve(self, stage: int) -> MemoryCurve:
        passes = [(each.start_s, each.content.memory) for each in self.holding(stage)]
        return curve_of_parts([*passes, (0.0, tuple(copy.memory for copy in self.copied[stage]))])

    def regenerated(self, stage: int) -> MemoryCurve:
        """Bytes of recomputed tensors in `memory`. At the end of a half they are freed before its kept ones."""
        return curve_of_parts([(each.start_s, each.content.regenerated) for each in self.executed[stage]])

    def timeline(self) -> Timeline:
        both = zip(self.executed, self.copied, strict=True)
        return Timeline(
            {stage: (*_spans(executed, self._halts(stage)), *map(_copy, copied)) for stage, (executed, copied) in enumerate(both)}
        )

    def _halts(self, stage: int) -> Sequence[float]:
        """Times at which a stage resumes after something that is not an action."""
        return ()


def _spans(executed: Sequence[Executed], halts: Sequence[float]) -> Iterator[Span]:
    backward_actions = _backward_actions(executed)
    free_s = 0.0
    for each, whose in zip(executed, backward_actions, strict=True):
        free_s = max([free_s, *(end_s for end_s in halts if end_s <= each.arrived_s)])
        if each.action.kind != "R":
            if each.arrived_s > free_s:
                name = f"pipe.recv_{'forward' if each.action.kind == 'F' else 'backward'}"
                yield Span("recv", free_s, each.arrived_s, micro_batch=each.action.micro_batch, window=name, name=name)
            free_s = each.end_s
        stretched = (each.end_s - each.start_s) / each.content.seconds if each.content.seconds else 1.0
        for span in each.content.spans:
            owner = whose if span.kind in ("replay", "gather") else each.action
            start_s, end_s = (each.start_s + stretched * at for at in (span.start_s, span.end_s))
            placed = span._replace(start_s=start_s, end_s=end_s, micro_batch=owner.micro_batch)
            if span.kind == "weight_gradient":  # an earlier backward's
                placed = placed._replace(micro_batch=None)
            yield from _parted(placed, each.end_s - _delay_s(each)) if each.action.kind == "R" else (placed,)


def _busy_s(each: Executed) -> float:
    return _delay_s(each) if each.action.kind == "R" else each.content.seconds - each.content.copy_wait_s


def _delay_s(received: Executed) -> float:
    """Seconds by which work in a receive delays the backward."""
    return received.content.exposed_s + received.content.unfilled_s


def _copy(copied: Copied) -> Span:
    kind: Literal["offload", "reload"] = "offload" if copied.action.kind == "F" else "reload"
    return Span(kind, copied.start_s, copied.end_s, micro_batch=copied.action.micro_batch, name=f"{kind} {copied.action}")


def _parted(replay: Span, hidden_until_s: float) -> Iterator[Span]:
    """Split a recomputation, or a weight gradient, into its hidden and its exposed part of a receive."""
    if replay.start_s < hidden_until_s:
        yield replay._replace(end_s=min(replay.end_s, hidden_until_s))
    if replay.end_s > hidden_until_s:
        exposed = FLUSHED if replay.kind == "weight_gradient" else ON_DEMAND
        yield replay._replace(start_s=max(replay.start_s, hidden_until_s), window=exposed)


def _backward_actions(executed: Sequence[Executed]) -> list[Action]:
    """By action, the pass whose recomputations it runs: itself, or for a forward the backward after it."""
    following = [*[after.action for after in executed[1:]], None]
    return [
        after if after is not None and each.action.kind == "F" else each.action
        for each, after in zip(executed, following, strict=True)
    ]
