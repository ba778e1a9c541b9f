"""The orders of 1F1B and interleaved 1F1B: written out where small, and what holds for all of them."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.errors import ConfigError
from megatron_lynx.schedule.flushes import goes_back_at_once, passes_of, with_flushes
from megatron_lynx.schedule.schedule import Action, Schedule
from tests.schedule.orders import most_in_flight, read_action, read_actions


@st.composite
def plain_schedules(draw: st.DrawFn) -> Schedule:
    return with_flushes(draw(st.integers(1, 8)), draw(st.integers(1, 20)))


@st.composite
def interleaved_schedules(draw: st.DrawFn) -> Schedule:
    """Group sizes between the pipeline and the step; the last group is empty or has a micro-batch for every stage."""
    pipeline, chunks = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    group = draw(st.integers(pipeline, 2 * pipeline))
    whole_groups, last = draw(st.integers(1, 3)), draw(st.just(0) | st.integers(pipeline, group))
    return with_flushes(pipeline, whole_groups * group + last, chunks, group)


schedules = st.one_of(plain_schedules(), interleaved_schedules())


@given(st.builds(Action, st.integers(0, 10**6), st.sampled_from("FRB"), st.integers(0, 99)))
def test_an_action_reads_back(action: Action) -> None:
    assert read_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "2F", "F0", "2X0", "2f0", "-1F0", "02F0", "2F00", "2F0 ", "2F0\n", "٢F0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no action"):
        read_action(text)


def test_1f1b_of_three_stages_written_out() -> None:
    first, second, last = with_flushes(3, 4).orders
    assert first == read_actions("0F0 1F0 | 2F0 0B0  3F0 1B0 | 2B0 3B0")
    assert second == read_actions("0F0 | 1F0 0B0  2F0 1B0  3F0 2B0 | 3B0")
    assert last == read_actions("0F0 0B0  1F0 1B0  2F0 2B0  3F0 3B0")


def test_fewer_micro_batches_than_warm_ups() -> None:
    assert with_flushes(4, 2).orders[0] == read_actions("0F0 1F0 0B0 1B0")


def test_interleaved_of_two_stages_and_two_chunks_written_out() -> None:
    first, last = with_flushes(2, 4, 2).orders
    assert last == read_actions("0F0 1F0 | 0F1 0B1  1F1 1B1  2F0 0B0  3F0 1B0  2F1 2B1  3F1 3B1 | 2B0 3B0")
    assert first == read_actions("0F0 1F0 0F1 1F1 | 2F0 0B1  3F0 1B1  2F1 0B0  3F1 1B0 | 2B1 3B1 2B0 3B0")


def test_a_last_group_of_another_size() -> None:
    """Megatron's own example in its schedule's comments: p 2, groups of 3, 5 micro-batches, 2 chunks."""
    forwards = [action for action in with_flushes(2, 5, 2, 3).orders[0] if action.kind == "F"]
    assert forwards == list(read_actions("0F0 1F0 2F0 0F1 1F1 2F1 3F0 4F0 3F1 4F1"))


@given(schedules)
def test_every_micro_batch_goes_forward_once_and_then_backward_once(schedule: Schedule) -> None:
    for order in schedule.orders:
        forwards = [(action.micro_batch, action.chunk) for action in order if action.kind == "F"]
        backwards = [(action.micro_batch, action.chunk) for action in order if action.kind == "B"]
        assert sorted(forwards) == sorted(backwards) == sorted(set(forwards))
        place = {action: index for index, action in enumerate(order)}
        assert all(place[Action(i, "F", c)] < place[Action(i, "B", c)] for i, c in forwards)
        for chunk in range(schedule.chunks):
            assert [i for i, c in forwards if c == chunk] == [i for i, c in backwards if c == chunk], "first in, first out"


@given(st.integers(1, 8), st.integers(1, 20))
def test_a_1f1b_stage_holds_p_minus_s_micro_batches(pipeline: int, microbatches: int) -> None:
    held = [most_in_flight(order) for order in with_flushes(pipeline, microbatches).orders]
    assert held == [min(pipeline - stage, microbatches) for stage in range(pipeline)]


@given(st.integers(2, 6), st.integers(2, 4), st.integers(2, 4))
def test_the_first_interleaved_stage_holds_vp_plus_p_minus_1_chunks(pipeline: int, chunks: int, groups: int) -> None:
    schedule = with_flushes(pipeline, groups * pipeline, chunks)
    assert most_in_flight(schedule.orders[0]) == chunks * pipeline + pipeline - 1


@given(schedules)
def test_phases_are_warm_up_then_steady_then_cool_down(schedule: Schedule) -> None:
    for stage in range(schedule.pipeline):
        phases = list(schedule.phases(stage))
        steady = [action for action, phase in phases if phase == "steady"]
        assert [action.kind for action in steady] == ["F", "B"] * (len(steady) // 2)
        assert all(action.kind == "B" for action, phase in phases if phase == "cooldown")
        ranks = [("warmup", "steady", "cooldown").index(phase) for _, phase in phases]
        last_stage = schedule.warmups[stage] == 0
        assert ranks == sorted(ranks)
        assert not (last_stage and steady), "forwards of the last stage hide nothing"


@given(interleaved_schedules())
def test_what_goes_back_at_once(schedule: Schedule) -> None:
    microbatches = sum(action.kind == "F" and action.chunk == 0 for action in schedule.orders[0])
    group = schedule.warmups[-1] // (schedule.chunks - 1)
    for stage, order in enumerate(schedule.orders):
        for chunk in range(schedule.chunks):
            own = [(one, after) for one, after in pairwise(order) if one.kind == "F" and one.chunk == chunk]
            at_once = len(own) == microbatches and all(after == Action(one.micro_batch, "B", chunk) for one, after in own)
            if goes_back_at_once(schedule.pipeline, stage, microbatches, chunk, schedule.chunks, group):
                assert at_once


@pytest.mark.parametrize(
    ("requested", "answer"),
    [
        ((4, 2, 2), "micro-batches of a pipeline: found 2, needed a multiple of pipeline (4)"),
        ((4, 10, 2, 5), None),
        ((4, 11, 2, 5), "found 11, needed in groups of microbatch_group (5), the last of at least pipeline (4)"),
    ],
)
def test_what_megatron_refuses_is_refused(requested: tuple[int, ...], answer: str | None) -> None:
    with pytest.raises(ConfigError) if answer else nullcontext() as refusal:
        with_flushes(*requested)
    assert answer is None or answer in str(refusal.value.problems[0])


@pytest.mark.parametrize(
    "shape", [(1, 3, 1, None), (4, 6, 1, None), (4, 2, 1, None), (3, 6, 2, None), (2, 9, 3, 3), (2, 4, 2, 4)]
)
def test_one_stage_alone_does_what_it_does_among_all(shape: tuple[int, int, int, int | None]) -> None:
    pipeline, microbatches, chunks, group = shape
    schedule = with_flushes(pipeline, microbatches, chunks, group)
    for stage in range(pipeline):
        assert list(passes_of(pipeline, stage, microbatches, chunks, group)) == list(schedule.phases(stage))
