"""What a schedule that braids forwards with backwards leaves for a plan, on rows of `benchmarks.when_not`.

    python -m benchmarks.braided [what a row's name has in it]     the table of docs/generated/braided.md

STP (Qi et al., arXiv 2510.27257) interleaves a forward of one micro-batch with a backward of another, so that each computes
during the other's tensor-parallel collectives. It recomputes nothing, and holds one micro-batch more.

    apart      F ##..##..##..   B ####...####...####...       # compute, . waits of a pass: spans of the simulator's passes
    braided    F ##..    ##..
               B   ####...  ####...                           one of the two computes at a time

1F1B runs one forward more before its first backward, and a steady forward and backward last as long as their shortest braid.
Warm-up and cool-down keep their waits. Favours STP: collectives and GEMMs that run together cost each other nothing, nor do two
collectives. Against it: its own schedule, a V of two chunks, also shortens the bubble.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from benchmarks.when_not import CASES, REFERENCE, job_of, on_devices_of, within
from megatron_lynx.config.job import Job
from megatron_lynx.cost.section import Prices
from megatron_lynx.planner import decide, uniform_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import RehearsedStage
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.simulator.passes import ChunkPasses, TimedPass
from megatron_lynx.simulator.simulate import simulate
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.stock import NONE
from megatron_lynx.stock.price import memory_of_stages
from megatron_lynx.units import GIB

Interval = tuple[float, float]
"""Begin and end of a stretch of compute, in seconds of its pass alone."""
EPSILON_S = 1e-12
PIECES = 4
"""A stretch between two waits may be interrupted between its kernels; with 8 equal pieces no step is 1 % shorter than with 4."""


def computing(one: TimedPass) -> list[Interval]:
    """Pieces of a pass between its waits."""
    begun_s, stretches = 0.0, []
    for window in sorted((span for span in one.spans if span.kind == "window"), key=lambda span: span.start_s):
        stretches.append((begun_s, window.start_s))
        begun_s = window.end_s
    lengths = [(begin, (end - begin) / PIECES) for begin, end in (*stretches, (begun_s, one.seconds))]
    return [
        (begin + at * length, begin + (at + 1) * length)
        for begin, length in lengths
        if length > EPSILON_S
        for at in range(PIECES)
    ]


def braided_s(first: Sequence[Interval], second: Sequence[Interval], lengths_s: Interval) -> float:
    """Shortest seconds of two passes that do not compute at the same time.

    A shortest path among obstacles (Akers 1956): a point is how far each pass is, a diagonal step runs both, and the rectangle of
    two pieces of compute is passed at its upper left or its lower right corner.
    """
    reached, waiting, shortest_s = {(0.0, 0.0): 0.0}, [(0.0, 0.0, 0.0)], inf
    while waiting:
        _, x, y = heapq.heappop(waiting)
        time_s = reached[x, y]
        if (both := _conflict(first, second, x, y)) is None:
            shortest_s = min(shortest_s, time_s + max(lengths_s[0] - x, lengths_s[1] - y))
            continue
        (begin, end), (other_begin, other_end) = both
        for corner in ((begin, other_end), (end, other_begin)):
            if corner[0] < x - EPSILON_S or corner[1] < y - EPSILON_S:
                continue
            at_s = time_s + max(corner[0] - x, corner[1] - y)
            if corner not in reached:
                heapq.heappush(waiting, (sum(corner), *corner))
            reached[corner] = min(at_s, reached.get(corner, inf))
    return shortest_s


def _conflict(first: Sequence[Interval], second: Sequence[Interval], x: float, y: float) -> tuple[Interval, Interval] | None:
    """The first stretches that two passes, run on from `x` and `y`, would compute at the same time."""
    one = next((at for at, (_, end) in enumerate(first) if end > x + EPSILON_S), len(first))
    other = next((at for at, (_, end) in enumerate(second) if end > y + EPSILON_S), len(second))
    while one < len(first) and other < len(second):
        (begin, end), (other_begin, other_end) = first[one], second[other]
        if max(begin - x, other_begin - y) < min(end - x, other_end - y) - EPSILON_S:
            return first[one], second[other]
        if end - x <= other_end - y:
            one += 1
        else:
            other += 1
    return None


@dataclass(frozen=True)
class Braided:
    """A step without recomputation whose steady passes are braided."""

    none_s: float
    """The same step with passes one after the other."""
    step_s: float
    more_bytes: int
    """What the fullest stage holds more."""
    waits_s: float
    """Of a micro-batch's steady passes in all stages."""
    left_s: float
    """The same, braided: neither pass computes."""


def braided(job: Job, profile: Profile) -> Braided:
    plan, prices = uniform_plan(job, "none"), Prices(profile)
    apart = [RehearsedStage(plan, stage, prices).passes() for stage in range(job.parallel.pipeline)]
    pairs, waits_s, left_s = [], 0.0, 0.0
    for (chunk,) in apart:
        forward, backward = chunk.one("F", "steady"), chunk.one("B", "steady")
        stretches = computing(forward), computing(backward)
        compute_s = sum(end - begin for each in stretches for begin, end in each)
        together_s = braided_s(*stretches, (forward.seconds, backward.seconds))
        waits_s += forward.seconds + backward.seconds - compute_s
        left_s += together_s - compute_s
        pairs.append([chunk.with_steady(TimedPass(together_s), TimedPass())])
    usual, ahead = (_simulated(job, profile, apart, more) for more in (0, 1))
    totals = [memory.total for memory in memory_of_stages(job, NONE)]
    held = [ahead.memory(stage).peak_bytes - usual.memory(stage).peak_bytes for stage in range(len(apart))]
    most_bytes = max(total + more for total, more in zip(totals, held, strict=True))
    return Braided(usual.step_s, _simulated(job, profile, pairs, 1).step_s, most_bytes - max(totals), waits_s, left_s)


def _simulated(job: Job, profile: Profile, chunks: Sequence[Sequence[ChunkPasses]], more: int) -> Simulation:
    """`more`: forwards before the first backward, besides 1F1B's."""
    message_s = profile.link_s("p2p", profile.attention.input_bytes) if job.parallel.pipeline > 1 else 0.0
    return simulate(with_flushes(job.parallel.pipeline, job.microbatches, more=more), chunks, message_s, profile.interference)


def lines(part: str) -> Iterator[str]:
    """Markdown, of rows with tensor parallelism. Steps are ratios to stock none."""
    yield "| layout | none holds | STP holds | STP | waits left | plan in STP's bytes | budget | plan in the budget |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for what, change in CASES:
        if part in what and {**REFERENCE, **change}["tensor"] > 1:
            yield _line(what, job_of(change))


def _line(what: str, job: Job) -> str:
    profile = analytic_profile(job)
    made, most = braided(job, profile), max(memory.total for memory in memory_of_stages(job, NONE))
    holds_gib = (most + made.more_bytes) / GIB
    jobs = on_devices_of(job, holds_gib), within(job).model_copy(update={"offload_ratio": "auto"})
    same, less = (f"{decide(each, profile).simulation.step_s / made.none_s:.2f}" for each in jobs)
    sizes = [f"{gib:.0f} GiB" for gib in (most / GIB, holds_gib)]
    figures = [what, *sizes, f"{made.step_s / made.none_s:.2f}", f"{max(0.0, made.left_s) / made.waits_s:.0%}", same]
    return f"| {' | '.join([*figures, f'{jobs[1].memory_budget_bytes / GIB:.0f} GiB', less])} |"


if __name__ == "__main__":
    print("\n".join(lines(sys.argv[1] if len(sys.argv) > 1 else "")))
