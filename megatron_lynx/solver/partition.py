"""Layers of each stage for the shortest step, exposed recomputation included.

    step = (m - 1) x slowest stage  +  all stages once       time(s, n): stage s with n layers; infinite if none fits

    greedy   begin even; move a layer from the slowest stage to the fastest while the slowest gets faster (Lynx)
    exact    for every pace, from the fastest: the least sum with no stage slower than that, by a dynamic program over
             (stage, layers before it); stop at the first pace that cannot beat the best step

m times a stage's seconds without recomputation is a lower bound, which excludes counts before they are priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from megatron_lynx.units import SECOND_DIGITS

StageTime = Callable[[int, int], float]
"""Seconds of one micro-batch, forward and backward, on a stage with this number of layers; `inf` if they do not fit."""

Counts = tuple[int, ...]
"""Layers of each stage."""


def step_s(counts: Sequence[int], microbatches: int, time: StageTime) -> float:
    """Return the seconds of a step by the closed form of 1F1B (`cost.stage.step_s`). Times include delaying messages."""
    times = [time(stage, count) for stage, count in enumerate(counts)]
    return inf if inf in times else round((microbatches - 1) * max(times) + sum(times), SECOND_DIGITS)


def even(layers: int, stages: int) -> Counts:
    """Spread layers evenly. The remainder goes to the last stages, which have fewer micro-batches in flight."""
    count, more = divmod(layers, stages)
    return (count,) * (stages - more) + (count + 1,) * more


def best(layers: int, stages: int, microbatches: int, time: StageTime, least: StageTime | None = None) -> Counts | None:
    """Return the fastest partition, or None if none fits. Ties go to the even one, then to the greedy one.

    least: a cheap lower bound of `time`. Both grow with the number of layers.
    """
    start = even(layers, stages)
    candidates = [start, greedy(start, time)]
    bound_s = min(step_s(counts, microbatches, time) for counts in candidates)
    ranges = promising(layers, stages, microbatches, bound_s, least or time)
    candidates += [counts for counts in [exact(layers, ranges, microbatches, time)] if counts is not None]
    fastest_counts = min(candidates, key=lambda counts: step_s(counts, microbatches, time))
    return fastest_counts if step_s(fastest_counts, microbatches, time) < inf else None


def greedy(start: Counts, time: StageTime) -> Counts:
    """Move layers as Lynx does: stop at the first move that does not help."""
    counts = start
    while True:
        moved = _moved(counts, [time(stage, count) for stage, count in enumerate(counts)])
        if moved is None or _slowest(moved, time) >= _slowest(counts, time):
            return counts
        counts = moved


def exact(layers: int, ranges: Sequence[range], microbatches: int, time: StageTime) -> Counts | None:
    """Return the optimum among counts in `ranges`, one for each stage; None if none fits."""
    times = [_affordable(stage, counts, time) for stage, counts in enumerate(ranges)]
    least = _least_sum(layers, times, inf)
    optimum: tuple[float, Counts] | None = None
    if least is None:
        return None
    for pace_s in sorted({seconds for stage in times for seconds in stage.values()}):
        if optimum is not None and (microbatches - 1) * pace_s + least[0] >= optimum[0]:
            break
        answer = _least_sum(layers, times, pace_s)
        if answer is None:
            continue
        step = (microbatches - 1) * pace_s + answer[0]
        if optimum is None or step < optimum[0]:
            optimum = step, answer[1]
    return None if optimum is None else optimum[1]


def promising(layers: int, stages: int, microbatches: int, bound_s: float, least: StageTime) -> list[range]:
    """Return for each stage the counts that may give a step shorter than `bound_s`."""
    most_layers = [_count_within(layers - stages + 1, least, stage, bound_s / microbatches) for stage in range(stages)]
    return [range(max(1, layers - (sum(most_layers) - most_layers[stage])), most_layers[stage] + 1) for stage in range(stages)]


def spread(count: int, chunks: int, *, last_stage: bool) -> Counts:
    """Spread the layers of a stage evenly over its chunks. Chunks with an end of the model get fewer: the first ones, or on the
    last stage the last ones."""
    counts = even(count, chunks)
    return tuple(reversed(counts)) if last_stage else counts


def _affordable(stage: int, counts: Iterable[int], time: StageTime) -> dict[int, float]:
    """Return the finite times. If a count does not fit, larger ones do not either; a small one may be too few for the stage's
    chunks."""
    times: dict[int, float] = {}
    for count in counts:
        seconds = time(stage, count)
        if seconds < inf:
            times[count] = seconds
        elif times:
            break
    return times


def _least_sum(layers: int, times: Sequence[dict[int, float]], pace_s: float) -> tuple[float, Counts] | None:
    """Return the least sum over counts with no stage slower than `pace_s`. Ties go to fewer layers on the first stages."""
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
    """Move a layer from the slowest stage to the fastest. Returns None if the slowest has only one."""
    slowest, fastest = (choose(range(len(times)), key=lambda stage: times[stage]) for choose in (max, min))
    if counts[slowest] == 1 or slowest == fastest:
        return None
    return tuple(count - (stage == slowest) + (stage == fastest) for stage, count in enumerate(counts))


def _slowest(counts: Counts, time: StageTime) -> float:
    return max(time(stage, count) for stage, count in enumerate(counts))


def _count_within(limit: int, least: StageTime, stage: int, bound_s: float) -> int:
    """Return the largest count up to `limit` within the bound, at least 1. All smaller counts are within it, too."""
    return next((count - 1 for count in range(2, limit + 1) if least(stage, count) > bound_s), max(1, limit))
