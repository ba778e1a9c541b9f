"""Result of a simulated step: start and end of each action, and each stage's figures."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Any, Literal, NamedTuple

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.cost.host import HostLoad
from megatron_lynx.once import once
from megatron_lynx.schedule.schedule import Action, Phase
from megatron_lynx.simulator.passes import ChunkPasses, Copied, TimedPass
from megatron_lynx.timeline import FLUSHED, MemoryCurve, Span, Timeline, curve_of_parts


class Executed(NamedTuple):
    action: Action
    phase: Phase
    arrived_s: float
    """Time at which its stage was free and its message had arrived."""
    start_s: float
    end_s: float
    content: TimedPass
    copy_wait_s: float = 0.0


class Repeated(NamedTuple):
    """The actions of a group of micro-batches that run `times` more times in a step, every `period_s`."""

    times: int
    period_s: float
    places: tuple[range, ...]


class Updated(NamedTuple):
    """An update of all stages between two batches of a pipeline that is never flushed."""

    arrived_s: float
    begin_s: float
    """When the last stage arrives."""


@dataclass(frozen=True)
class Simulation:
    """One simulated step, by stage. `executed` and `copied` leave out the `repeated` part. With `updates` they are a whole run
    without flushes, and the step's figures are those of its last batch but one, which is in steady state.

    In Megatron's combined schedule a forward and a backward of different micro-batches are interleaved node by node:

    apart       F0 B0 F1 B1 F2 B2 ...              bytes: of these passes, and at most one layer more, counted separately
    together    F0 [F1 with B0] [F2 with B1] ... B seconds: of each pair (`cost.combined`)

    A pair is a forward of the pair's length and a backward that takes no time. Half-by-half copies run in both directions during
    a pair, and a pair waits for copies that are longer.
    """

    executed: tuple[tuple[Executed, ...], ...]
    copied: tuple[tuple[Copied, ...], ...]
    _: KW_ONLY
    updates: tuple[tuple[Updated, ...], ...] = ()
    repeated: Repeated | None = None
    apart: Simulation | None = None
    more_bytes: tuple[int, ...] = ()
    """Bytes in flight to and from the host in both passes of a pair, beyond those of one pass and a layer."""

    @cached_property
    def step_s(self) -> float:
        if self.updates:
            begin_s, end_s = self._batch_s(0)
            return end_s - begin_s
        end_s = max((execution.end_s for stage in self.executed for execution in stage[-1:]), default=0.0)
        return end_s if self.repeated is None else end_s + self.repeated.times * self.repeated.period_s

    def _batch_s(self, stage: int) -> tuple[float, float]:
        """Beginning and end of a run's last batch but one."""
        before, update, _ = self.updates[stage][-3:]
        return before.begin_s, update.begin_s

    @property
    def held(self) -> Simulation:
        """The simulation of the passes whose bytes count."""
        return self.apart or self

    @property
    def idle_at_end_s(self) -> list[float]:
        """By stage."""
        ends_s = [stage[-1].end_s for stage in self.executed]
        return [max(ends_s) - end_s for end_s in ends_s]

    def times(self, stage: int) -> Sequence[int]:
        """How often each executed action of a stage counts in the step."""
        if self.updates:
            begin_s, end_s = self._batch_s(stage)
            return [int(begin_s <= execution.start_s < end_s) for execution in self.executed[stage]]
        repeated = self.repeated or Repeated(0, 0.0, (range(0),) * len(self.executed))
        return [1 + repeated.times * (at in repeated.places[stage]) for at in range(len(self.executed[stage]))]

    def total(self, stage: int, name: str, chunk: int | None = None) -> float:
        """Sum a field of `TimedPass`."""
        return self._sum(stage, lambda execution: getattr(execution.content, name), chunk)

    def _sum(self, stage: int, seconds: Callable[[Executed], float], chunk: int | None = None) -> float:
        counted = zip(self.executed[stage], self.times(stage), strict=True)
        return sum([times * seconds(execution) for execution, times in counted if chunk in (None, execution.action.chunk)])

    def busy_s(self, stage: int) -> float:
        """Seconds of passes, including tensor-parallel waits, and of work in a receive that delays a pass."""
        return self._sum(stage, _busy_s)

    def bubble_s(self, stage: int) -> float:
        """Seconds without a pass or a wait for a copy; includes hidden recomputation."""
        return self.step_s - self.busy_s(stage) - self.exposed_copy_s(stage)

    def exposed_copy_s(self, stage: int) -> float:
        return self._sum(stage, lambda execution: execution.copy_wait_s + execution.content.copy_wait_s)

    @cached_property
    def host_bound(self) -> tuple[HostLoad, ...]:
        """Host-bound stages, with host and device seconds of their passes."""
        late_s = [self.total(stage, "host_late_s") for stage in range(len(self.executed))]
        late = (stage for stage, seconds in enumerate(late_s) if seconds > 0)
        return tuple(HostLoad(stage, self.total(stage, "host_s"), self.busy_s(stage) - late_s[stage]) for stage in late)

    @once
    def memory(self, stage: int) -> MemoryCurve:
        """Activation bytes of the stage's layers over time."""
        passes = [(execution.start_s, execution.content.memory) for execution in self.held.executed[stage]]
        more = tuple((0.0, size) for size in self.more_bytes[stage : stage + 1])
        return curve_of_parts([(0.0, more), *passes, (0.0, tuple(copy.memory for copy in self.held.copied[stage]))])

    def regenerated(self, stage: int) -> MemoryCurve:
        """Bytes of recomputed tensors in `memory`. At the end of a half they are freed before its kept ones."""
        return curve_of_parts([(execution.start_s, execution.content.regenerated) for execution in self.held.executed[stage]])

    def timeline(self) -> Timeline:
        stages = zip(self.executed, self.copied, self.updates or [()] * len(self.executed), strict=True)
        return Timeline({number: tuple(_spans(*stage)) for number, stage in enumerate(stages)})


def _spans(executed: Sequence[Executed], copied: Sequence[Copied], updates: Sequence[Updated]) -> Iterator[Span]:
    free_s = 0.0
    for execution in executed:
        free_s = max([free_s, *(update.begin_s for update in updates if update.begin_s <= execution.arrived_s)])
        if execution.action.is_pass:
            if execution.arrived_s > free_s:
                name = f"pipe.recv_{'forward' if execution.action.kind == 'F' else 'backward'}"
                yield Span("recv", free_s, execution.arrived_s, micro_batch=execution.action.micro_batch, window=name, name=name)
            free_s = execution.end_s
        stretched = (execution.end_s - execution.start_s) / execution.content.seconds if execution.content.seconds else 1.0
        for span in execution.content.spans:
            start_s, end_s = (execution.start_s + stretched * at for at in (span.start_s, span.end_s))
            micro_batch = None if span.kind == "weight_gradient" else execution.action.micro_batch  # those are of earlier ones
            placed = span._replace(start_s=start_s, end_s=end_s, micro_batch=micro_batch)
            yield from (placed,) if execution.action.is_pass else _parted(placed, execution.end_s - _delay_s(execution))
    for copy in copied:
        kind: Literal["offload", "reload"] = "offload" if copy.action.kind == "F" else "reload"
        yield Span(kind, copy.start_s, copy.end_s, micro_batch=copy.action.micro_batch, name=f"{kind} {copy.action}")
    for batch, (arrived_s, begin_s) in enumerate(updates):
        if begin_s > arrived_s:
            yield Span("update", arrived_s, begin_s, name=f"update {batch}")


def _busy_s(execution: Executed) -> float:
    return execution.content.seconds - execution.content.copy_wait_s if execution.action.is_pass else _delay_s(execution)


def _delay_s(received: Executed) -> float:
    """Seconds by which work in a receive delays the backward."""
    return received.content.exposed_s + received.content.unfilled_s


def _parted(recompute: Span, hidden_until_s: float) -> Iterator[Span]:
    if recompute.start_s < hidden_until_s:
        yield recompute._replace(end_s=min(recompute.end_s, hidden_until_s))
    if recompute.end_s > hidden_until_s:
        exposed = FLUSHED if recompute.kind == "weight_gradient" else ON_DEMAND
        yield recompute._replace(start_s=max(recompute.start_s, hidden_until_s), window=exposed)


FEWEST_GROUPS = 4
"""With this many groups of micro-batches, every stage has two in its steady phase."""

PERIODIC = 1e-9
"""Relative difference up to which shifts count as equal."""


def in_steady_state(group: int, microbatches: int, simulated: Callable[[int], Simulation]) -> Simulation:
    """Return a step of `microbatches`, extended from one of few.

        stage 0   F F F | F B F B | F B F B | F B ... B B B
                         (  group ) (  group )

    Once every pass and copy follows the same one of the group before by the same time on every stage, each further group adds
    this time. `group`: micro-batches after which the order of the schedule repeats.
    """
    groups, rest = divmod(microbatches, group)
    few = FEWEST_GROUPS
    while few < groups:
        simulation = simulated(few * group + rest)
        places = tuple(_last_group(executed, group) for executed in simulation.executed)
        if (period_s := period_of(simulation, places, group)) is not None:
            return replace(simulation, repeated=Repeated(groups - few, period_s, places))
        few += few - 3  # 5, 7, 11, ...: most are by then
    return simulated(microbatches)


def period_of(simulation: Simulation, places: Sequence[range], group: int) -> float | None:
    """Seconds between an action and the same one `group` micro-batches earlier, in these places of the stages' actions.

    Returns None if actions, copies or stages differ in it: the pipeline is not yet in steady state.
    """
    shifts = []
    for executed, copied, place in zip(simulation.executed, simulation.copied, places, strict=True):
        known: dict[Action, tuple[Any, ...]] = {run.action: (run.content, run.end_s) for run in executed if run.action.is_pass}
        known |= {copy.action: (*known[copy.action], copy.end_s) for copy in copied}
        for action in (execution.action for execution in executed[place.start : place.stop] if execution.action.is_pass):
            content, *ends_s = known[action]
            before, *before_s = known.get(action._replace(micro_batch=action.micro_batch - group), (None,))
            alike = before is content and len(before_s) == len(ends_s)
            shifts += [end_s - earlier_s for end_s, earlier_s in zip(ends_s, before_s, strict=True)] if alike else [inf]
    longest_s = max(shifts)
    return longest_s if longest_s - min(shifts) <= PERIODIC * min(shifts) < inf else None


def _last_group(executed: Sequence[Executed], group: int) -> range:
    """Indices of a stage's last full group of forward-backward pairs, with recomputation in receives."""
    passes = [(at, execution.action) for at, execution in enumerate(executed) if execution.action.is_pass]
    last_forward = max(number for number, (_, action) in enumerate(passes) if action.kind == "F")
    chunks = len({action.chunk for _, action in passes})
    rest = len(passes) // (2 * chunks) % group
    end = last_forward + 1 - 2 * max(1, rest * chunks)  # the last backward flushes delayed weight gradients
    return range(passes[max(0, end - 2 * group * chunks)][0] + 1, passes[end][0] + 1)


def most_beside(chunks: Sequence[ChunkPasses], layer_bytes: int) -> int:
    """Bytes that a pair of a half-by-half offloaded chunk holds beyond its separate passes and one layer, at most."""
    if len(chunks) > 1 or (passes := chunks[0].at_once) is None:
        return 0
    forward, backward = passes.one("F", "steady"), passes.one("B", "steady")
    kept_bytes = sum(change for _, change in forward.memory)
    made, left = list(_by_layer(forward)), [kept_bytes + size for size in _by_layer(backward)]
    together_bytes = max(map(sum, zip(made, left, strict=True)), default=0)
    return max(0, together_bytes - max(*made, *left, 0) - layer_bytes)


def _by_layer(one: TimedPass) -> Iterator[int]:
    """Peak bytes allocated since the pass began, during each of its layers."""
    times_s = [0.0, *(at_s for at_s, _ in one.memory)]
    taken = [0, *accumulate(change for _, change in one.memory)]
    ends_s = [*{span.layer: span.end_s for span in one.spans if span.kind in ("forward", "backward")}.values()]
    for begin_s, end_s in pairwise([0.0, *ends_s[:-1], one.seconds]):
        yield max(taken[max(0, bisect_left(times_s, begin_s) - 1) : bisect_right(times_s, end_s)])
