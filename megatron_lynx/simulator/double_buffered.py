"""Batches of a pipeline that is never flushed (`schedule.double_buffered`), and the seconds of one batch in the steady state.

An update U is a barrier: it begins when the last stage arrives, and takes no time here: `cost.update` adds its seconds. A step is
the time between two updates in the middle of the run.

A message is posted when its pass ends, and in flight once its receiver has posted it, too. The receiver waits when it needs the
message, the sender before its next message in that direction, so one message may be in flight during an update.

Between two updates a stage runs as many forwards and backwards as a batch has micro-batches, so its figures are one batch's.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from megatron_lynx.schedule.double_buffered import check, deferral
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.schedule.schedule import Action
from megatron_lynx.simulator.passes import ChunkPasses
from megatron_lynx.simulator.simulate import REST, Message, Run, Step
from megatron_lynx.simulator.simulation import Simulation, Updated

BATCHES = 5
"""Batches simulated, from filling to draining. The last but one is measured: stages are in step after one or two."""


def simulate_without_flushes(
    microbatches: int,
    chunks: Sequence[ChunkPasses],
    p2p_s: float = 0.0,
    interference: float = 1.0,
    *,
    deferred: bool = True,
) -> Simulation:
    """Simulate a run. `chunks` is indexed by stage. Raises ConfigError if a batch has fewer micro-batches than there are stages.

    `deferred`: whether a stage's update runs after the first backwards of the next batch (`schedule.double_buffered.deferral`).
    """
    check(len(chunks), microbatches)
    later = [deferral(stage) if deferred else 0 for stage in range(len(chunks))]
    return _UnflushedRun(microbatches, chunks, p2p_s, interference, later).simulation()


class _UnflushedRun(Run):
    """A running schedule with updates. `later`: by stage, the backwards of the next batch before an update."""

    def __init__(
        self, microbatches: int, chunks: Sequence[ChunkPasses], p2p_s: float, interference: float, later: Sequence[int]
    ) -> None:
        drained = BATCHES * microbatches
        super().__init__(
            with_flushes(len(chunks), drained), [[passes] for passes in chunks], p2p_s, interference, batch=microbatches
        )
        ends = [[min((batch + 1) * microbatches + more, drained) for batch in range(BATCHES)] for more in later]
        self._behind = [{Action(end - 1, "B"): batch for batch, end in enumerate(of_stage)} for of_stage in ends]
        """By stage, actions followed by an update, and that update's batch."""
        self._there: dict[int, list[float]] = {}
        """By batch, the times at which stages reached its update."""
        self._under_way: list[dict[str, Message]] = [{} for _ in chunks]
        """By stage and direction, the last message sent."""
        self._updates: list[list[Updated]] = [[] for _ in chunks]

    def simulation(self) -> Simulation:
        return replace(super().simulation(), updates=tuple(map(tuple, self._updates)))

    def _exchange(self, number: int, before: Step, step: Step, free: float) -> Generator[Message, float, tuple[float, float]]:
        sent, received, under_way = before.sent, step.received, self._under_way[number]
        if sent is not None:
            if (earlier := under_way.get(sent.kind)) is not None:
                free = max(free, (yield earlier))
            under_way[sent.kind] = sent
            self._post(sent, free)
            if step is REST:
                free = max(free, (yield sent))
        if received is not None:
            self._post(received, free)
        free = yield from self._updated(number, before, free)
        return free, free if received is None else max(free, (yield received))

    def _updated(self, number: int, before: Step, time_s: float) -> Generator[Message, float, float]:
        """Return when the update after an action has begun; `time_s` if there is none."""
        batch = self._behind[number].get(before.action)
        if batch is None:
            return time_s
        arrivals_s = self._there.setdefault(batch, [])
        arrivals_s.append(time_s)
        together = Message("U", batch, 0)
        if len(arrivals_s) == self._pipeline:
            self._arrivals[together] = max(arrivals_s)
            self._ready.extend(self._waiting.pop(together, ()))
        begin_s = yield together
        self._updates[number].append(Updated(time_s, begin_s))
        return begin_s
