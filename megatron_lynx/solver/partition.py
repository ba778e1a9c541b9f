"""How many layers each stage gets, so that a step is shortest: with what each stage has to replay included.

    step = (m - 1) x slowest stage  +  all stages once       stage s with n layers takes time(s, n): infinite where none fit

    greedy   begin even; move a layer from the slowest stage towards the fastest; keep it while the slowest got faster (Lynx)
    exact    for every pace, from the fastest that is possible: the least sum with no stage slower than that, by a dynamic
             programme over (stage, layers before it); the first pace whose step can no longer be beaten ends it

Counts that no better answer can have are never priced: m times what a stage takes even if it replays nothing is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from megatron_lynx.units import SECOND_DIGITS

StageTime = Callable[[int, int], float]
"""Seconds of one micro-batch, forward and backward, on a stage with so many layers. `inf`: they do not fit."""

Counts = tuple[int, ...]
"""Layers of each stage."""


def step_s(counts: Sequence[int], microbatches: int, time: StageTime) -> float:
    """The closed form of 1F1B (`cost.stage.step_s`); messages that hold a stage up are in its time."""
    times = [time(stage, count) for stage, count in enumerate(counts)]
    return inf if inf in times else round((microbatches - 1) * max(times) + sum(times), SECOND_DIGITS)


def even(layers: int, stages: int) -> Counts:
    """What is left over goes to the last stages, which have fewer micro-batches in flight."""
    each, more = divmod(layers, stages)
    return (each,) * (stages - more) + (each + 1,) * more


def best(layers: int, stages: int, microbatches: int, time: StageTime, least: StageTime | None = None) -> Counts | None:
    """The fastest answer; of equals the even one, then the greedy one. None where none fits.

    `least` bounds `time` from below and costs little; both grow with the layers.
    """
    start = even(layers, stages)
    candidates = [start, greedy(start, time)]
    bound_s = min(step_s(counts, microbatches, time) for counts in candidates)
    ranges = promising(layers, stages, microbatches, bound_s, least or time)
    candidates += [counts for counts in [exact(layers, ranges, microbatches, time)] if counts is not None]
    found = min(candidates, key=lambda counts: step_s(counts, microbatches, time))
    return found if step_s(found, microbatches, time) < inf else None


def greedy(start: Counts, time: StageTime) -> Counts:
    """Lynx's: it stops at the first move that does not help."""
    counts = start
    while True:
        moved = _moved(counts, [time(stage, count) for stage, count in enumerate(counts)])
        if moved is None or _slowest(moved, time) >= _slowest(counts, time):
            return counts
        counts = moved


def exact(layers: int, ranges: Sequence[range], microbatches: int, time: StageTime) -> Counts | None:
    """The optimum among counts in `ranges`, one for each stage. None where none fits."""
    times = [_affordable(stage, counts, time) for stage, counts in enumerate(ranges)]
    least = _least_sum(layers, times, inf)
    found: tuple[float, Counts] | None = None
    if least is None:
        return None
    for pace_s in sorted({seconds for stage in times for seconds in stage.values()}):
        if found is not None and (microbatches - 1) * pace_s + least[0] >= found[0]:
            break
        answer = _least_sum(layers, times, pace_s)
        if answer is None:
            continue
        step = (microbatches - 1) * pace_s + answer[0]
        if found is None or step < found[0]:
            found = step, answer[1]
    return None if found is None else found[1]


def promising(layers: int, stages: int, microbatches: int, bound_s: float, least: StageTime) -> list[range]:
    """For each stage the counts with which a step of less than `bound_s` is not impossible."""
    most = [_most(layers - stages + 1, least, stage, bound_s / microbatches) for stage in range(stages)]
    return [range(max(1, layers - (sum(most) - most[stage])), most[stage] + 1) for stage in range(stages)]


def spread(count: int, chunks: int, *, last_stage: bool) -> Counts:
    """The layers of one stage over its chunks, as evenly as may be. Fewer have the chunks with an end of the model's: the first
    ones, and on the last stage the last ones."""
    counts = even(count, chunks)
    return tuple(reversed(counts)) if last_stage else counts


def _affordable(stage: int, counts: Iterable[int], time: StageTime) -> dict[int, float]:
    """The finite times. More layers than do not fit fit neither; fewer may be too few for the stage's chunks."""
    times: dict[int, float] = {}
    for count in counts:
        seconds = time(stage, count)
        if seconds < inf:
            times[count] = seconds
        elif times:
            break
    return times


def _least_sum(layers: int, times: Sequence[dict[int, float]], pace_s: float) -> tuple[float, Counts] | None:
    """Over counts of which none is slower than `pace_s`. Of equals the first stages have fewest layers."""
    reached: dict[int, tuple[float, Counts]] = {0: (0.0, ())}
    for stage in times:
        longer: dict[int, tuple[float, Counts]] = {}
        for before, (total_s, counts) in reached.items():
            for count, seconds in stage.items():
                place, candidate = before + count, (total_s + seconds, (*counts, count))
                if seconds <= pace_s and place <= layers and (place not in longer or candidate < longer[place]):
                    longer[place] = candidate
        reached = longer
    return reached.get(layers)


def _moved(counts: Counts, times: Sequence[float]) -> Counts | None:
    """A layer from the slowest stage to the fastest. None where the slowest has no layer to spare."""
    slowest, fastest = (choose(range(len(times)), key=lambda stage: times[stage]) for choose in (max, min))
    if counts[slowest] == 1 or slowest == fastest:
        return None
    return tuple(count - (stage == slowest) + (stage == fastest) for stage, count in enumerate(counts))


def _slowest(counts: Counts, time: StageTime) -> float:
    return max(time(stage, count) for stage, count in enumerate(counts))


def _most(limit: int, least: StageTime, stage: int, bound_s: float) -> int:
    """The largest count up to `limit`, but at least 1, that takes no longer than the bound. So do all smaller ones."""
    return next((count - 1 for count in range(2, limit + 1) if least(stage, count) > bound_s), max(1, limit))
