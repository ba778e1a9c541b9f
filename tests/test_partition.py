"""Layers of each stage: moves of single layers against every answer there is."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.planner.partitioning import Counts, best, by_virtual_stage, step_s

growth = st.lists(st.sampled_from([0.5, 1.0, 1.0, 1.5, 3.0]), min_size=8, max_size=8).map(sorted)


@st.composite
def stage_times(draw):
    """(layers, stages, micro-batches, time): no layer takes less time than the one below it; infinite from some count on."""
    stages = draw(st.integers(1, 4))
    layers = draw(st.integers(stages, 8))
    steps = [draw(growth) for _ in range(stages)]
    ends = [draw(st.sampled_from([0.0, 0.5, 4.0])) for _ in range(stages)]
    room = [draw(st.integers(1, 8)) for _ in range(stages)]

    def time(stage: int, count: int) -> float:
        return inf if count > room[stage] else ends[stage] + sum(steps[stage][:count])

    return layers, stages, draw(st.integers(1, 20)), time


def compositions(layers: int, stages: int) -> Iterator[Counts]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(1, layers - stages + 2):
        yield from ((first, *rest) for rest in compositions(layers - first, stages - 1))


@settings(max_examples=200, deadline=None)
@given(stage_times())
def test_moves_of_single_layers_find_the_best_of_all_partitions(question):
    layers, stages, microbatches, time = question
    optimum = min(step_s(counts, microbatches, time) for counts in compositions(layers, stages))
    chosen = best(layers, stages, microbatches, time)
    assert (inf if chosen is None else step_s(chosen, microbatches, time)) == optimum


def test_a_slow_end_gives_layers_away():
    def time(stage: int, count: int) -> float:
        return count + (2.5 if stage == 3 else 0.0)

    assert max(time(stage, count) for stage, count in enumerate(best(32, 4, 16, time))) == 9
    assert best(32, 4, 16, lambda stage, count: float(count)) == (8, 8, 8, 8)


def test_layers_of_several_stages_move_where_all_are_slowest():
    """One of them alone makes the step longer."""

    def time(stage: int, count: int) -> float:
        return count + 3.0 if stage < 2 else 1.01 * count

    assert best(12, 4, 64, time) == (2, 2, 4, 4)
    assert step_s((2, 3, 4, 3), 64, time) > step_s((3, 3, 3, 3), 64, time)


def test_only_counts_next_to_the_even_ones_are_priced():
    for microbatches in (64, 640):
        priced = set()

        def time(stage: int, count: int, priced=priced) -> float:
            priced.add(count)
            return float(count)

        assert best(96, 16, microbatches, time) == (6,) * 16
        assert priced == {5, 6, 7}


def test_chunks_with_an_end_of_the_model_have_no_more_than_others():
    assert by_virtual_stage((7, 7), 3) == (2, 3, 2, 2, 3, 2)
