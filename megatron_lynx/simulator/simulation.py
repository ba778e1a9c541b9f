"""Result of a simulated step: start and end of each action, and each stage's figures.

stage   ├─F─┤   wait   ├──B──┤        wait        ├──B──┤        bubble  = everything but passes and exposed recomputations
                └R┘ hidden           └───R──┤exposed                    (waits, messages, the end of the step)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.cost.host import HostLoad
from megatron_lynx.schedule.schedule import Action, Phase
from megatron_lynx.simulator.copies import Copied
from megatron_lynx.simulator.passes import TimedPass
from megatron_lynx.timeline import FLUSHED, MemoryCurve, Span, Timeline, curve_of_parts

PERIODIC = 1e-9
"""Relative difference up to which shifts count as equal."""


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
    """Seconds of waiting for its copy from the host."""


@dataclass(frozen=True)
class Simulation:
    """One simulated step, by stage."""

    executed: tuple[tuple[Executed, ...], ...]
    copied: tuple[tuple[Copied, ...], ...]
    """Copies to and from the host."""

    @cached_property
    def step_s(self) -> float:
        return max((each.end_s for stage in self.executed for each in stage[-1:]), default=0.0)

    def period_s(self, group: int) -> float | None:
        """Seconds between an action and the same one `group` micro-batches earlier, in the last full group of forward-backward
        pairs.

        Returns None if actions or stages differ in it: the pipeline is not yet in steady state.
        """
        shifts = [shift for stage in range(len(self.executed)) for shift in self._shifts_s(stage, group)]
        longest_s = max(shifts)
        return longest_s if longest_s - min(shifts) <= PERIODIC * min(shifts) < inf else None

    def _shifts_s(self, stage: int, group: int) -> list[float]:
        """Shifts of one stage; infinite if the group before has no such action."""
        done = [each for each in self.counted(stage) if each.action.kind != "R"]
        last_forward = max(at for at, each in enumerate(done) if each.action.kind == "F")
        chunks = len({each.action.chunk for each in done})
        rest = len(done) // (2 * chunks) % group
        paired = done[: last_forward + 2 - 2 * rest * chunks]
        known = {each.action: each.end_s for each in paired}
        last = paired[-2 * group * chunks :]
        before = (known.get(each.action._replace(micro_batch=each.action.micro_batch - group), -inf) for each in last)
        return [each.end_s - before_s for each, before_s in zip(last, before, strict=True)]

    def counted(self, stage: int) -> Sequence[Executed]:
        """Actions of a stage that the step's figures count."""
        return self.executed[stage]

    def busy_s(self, stage: int) -> float:
        """Seconds of passes, including tensor-parallel waits, and of work in a receive that delays a pass."""
        counted = self.counted(stage)
        return sum(
            [_delay_s(each) if each.action.kind == "R" else each.content.seconds - each.content.copy_wait_s for each in counted]
        )

    def bubble_s(self, stage: int) -> float:
        """Seconds without a pass or a wait for a copy; includes hidden recomputation."""
        return self.step_s - self.busy_s(stage) - self.exposed_copy_s(stage)

    def exposed_copy_s(self, stage: int) -> float:
        return sum([each.copy_wait_s + each.content.copy_wait_s for each in self.counted(stage)])

    def copies(self, stage: int) -> bool:
        """Whether the stage offloads anything."""
        spans = (span for each in self.executed[stage] for span in each.content.spans)
        return bool(self.copied[stage]) or any(span.kind == "offload" for span in spans)

    def exposed_replay_s(self, stage: int) -> float:
        return sum([each.content.exposed_s for each in self.counted(stage)])

    def hidden_replay_s(self, stage: int) -> float:
        return sum([each.content.hidden_s for each in self.counted(stage)])

    def filled_s(self, stage: int) -> float:
        """Seconds of delayed weight gradients inside waits."""
        return sum([each.content.filled_s for each in self.counted(stage)])

    def unfilled_s(self, stage: int) -> float:
        """Seconds of exposed delayed weight gradients."""
        return sum([each.content.unfilled_s for each in self.counted(stage)])

    def host_s(self, stage: int) -> float:
        """Seconds in which the host issues the passes; 0 if unknown."""
        return sum([each.content.host_s for each in self.counted(stage)])

    def host_late_s(self, stage: int) -> float:
        """Seconds added to passes that are host-bound."""
        return sum([each.content.host_late_s for each in self.counted(stage)])

    @cached_property
    def host_bound(self) -> tuple[HostLoad, ...]:
        """Host-bound stages, with host and device seconds of their passes."""
        late = {stage: self.host_late_s(stage) for stage in range(len(self.executed))}
        return tuple(
            HostLoad(stage, self.host_s(stage), self.busy_s(stage) - late_s) for stage, late_s in late.items() if late_s > 0
        )

    def replays_of(self, stage: int, chunk: int) -> tuple[float, float]:
        """Seconds of one chunk's recomputations: hidden, exposed. A forward hides those of the next backward."""
        if stage not in self._served:
            self._served[stage] = _served(self.executed[stage])
        both = zip(self.executed[stage], self._served[stage], strict=True)
        own = [each.content for each, served in both if served.chunk == chunk]
        return sum([content.hidden_s for content in own]), sum([content.exposed_s for content in own])

    def weight_gradients_of(self, stage: int, chunk: int) -> tuple[float, float]:
        """Seconds of delayed weight gradients in one chunk's passes: hidden, exposed."""
        own = [each.content for each in self.executed[stage] if each.action.chunk == chunk]
        return sum([content.filled_s for content in own]), sum([content.unfilled_s for content in own])

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
    def _served(self) -> dict[int, list[Action]]:
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
        """Return the step as spans by stage: halves, windows, recomputations, copies, and waits for neighbours."""
        both = zip(self.executed, self.copied, strict=True)
        return Timeline(
            {stage: (*_spans(executed, self._halts(stage)), *map(_copy, copied)) for stage, (executed, copied) in enumerate(both)}
        )

    def _halts(self, stage: int) -> Sequence[float]:
        """Times at which a stage resumes after something that is not an action."""
        return ()


def _spans(executed: Sequence[Executed], halts: Sequence[float]) -> Iterator[Span]:
    served = _served(executed)
    free_s = 0.0
    for each, whose in zip(executed, served, strict=True):
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


def _served(executed: Sequence[Executed]) -> list[Action]:
    """By action, the pass whose recomputations it runs: itself, or for a forward the backward after it."""
    following = [*[after.action for after in executed[1:]], None]
    return [
        after if after is not None and each.action.kind == "F" else each.action
        for each, after in zip(executed, following, strict=True)
    ]
