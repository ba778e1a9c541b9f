"""PipeDream-2BW's order and version rule: written out where small, and what holds for every pipeline, batch size and length."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.errors import ConfigError
from megatron_lynx.schedule import flushes
from megatron_lynx.schedule.double_buffered import batch_order, buffer_of, deferral, defers_more_than_before, version_of
from megatron_lynx.schedule.schedule import Action
from tests.schedule.orders import Update, most_in_flight, order, write_actions

Setting = tuple[int, int, int, float]


@st.composite
def settings(draw: st.DrawFn) -> Setting:
    """(stages, micro-batches of a batch, batches, share of the backward for which updates are deferred)"""
    pipeline = draw(st.integers(1, 6))
    share = draw(st.sampled_from([0, 0.5, 2 / 3, 1]))
    return pipeline, draw(st.integers(pipeline, pipeline + 5)), draw(st.integers(1, 6)), share


def orders(setting: Setting) -> Iterator[tuple[int, tuple[Action | Update, ...]]]:
    pipeline, microbatches, batches, share = setting
    for stage in range(pipeline):
        yield stage, order(pipeline, stage, microbatches, batches, deferral=deferral(stage, share))


def actions(steps: tuple[Action | Update, ...]) -> tuple[Action, ...]:
    return tuple(step for step in steps if isinstance(step, Action))


def test_the_order_of_the_picture() -> None:
    assert write_actions(order(3, 0, 3, 3)) == (
        "0F0 1F0 2F0 0B0 3F0 1B0 4F0 2B0 U0 5F0 3B0 6F0 4B0 7F0 5B0 U1 8F0 6B0 7B0 8B0 U2"
    )
    assert write_actions(order(3, 2, 3, 2)) == "0F0 0B0 1F0 1B0 2F0 2B0 U0 3F0 3B0 4F0 4B0 5F0 5B0 U1"


def test_updates_that_wait_for_the_first_stage() -> None:
    assert [deferral(stage) for stage in range(4)] == [0, 1, 1, 2]
    assert write_actions(order(3, 1, 3, 3, deferral=1)) == (
        "0F0 1F0 0B0 2F0 1B0 3F0 2B0 4F0 3B0 U0 5F0 4B0 6F0 5B0 7F0 6B0 U1 8F0 7B0 8B0 U2"
    )


def test_the_rule_of_the_paper() -> None:
    """Micro-batch k, from 1, with m = 4: max(floor((k - 1) / m) - 1, 0)."""
    assert [version_of(k - 1, 4) for k in range(1, 17)] == [0] * 8 + [1] * 4 + [2] * 4


@given(settings())
def test_it_is_1f1b_over_all_micro_batches(setting: Setting) -> None:
    """Filled once, drained once; so p - s micro-batches in flight, as with flushes."""
    pipeline, microbatches, batches, _ = setting
    for stage, steps in orders(setting):
        assert actions(steps) == flushes.order(pipeline, stage, microbatches * batches)
        assert most_in_flight(actions(steps)) <= pipeline - stage


@given(settings())
def test_an_update_follows_its_last_backward(setting: Setting) -> None:
    """At once, or as many backwards of the next batch later as it is deferred; at once where the pipeline drains."""
    _, microbatches, batches, share = setting
    for stage, steps in orders(setting):
        places = [index for index, step in enumerate(steps) if isinstance(step, Update)]
        assert [steps[place] for place in places] == [Update(batch) for batch in range(batches)]
        for batch, place in enumerate(places):
            later = deferral(stage, share) if batch < batches - 1 else 0
            assert steps[place - 1] == Action((batch + 1) * microbatches - 1 + later, "B")


@given(settings())
def test_two_gradients_are_enough(setting: Setting) -> None:
    """A backward adds to its batch's gradient, in buffer batch mod 2: no other batch's is left in there, all of its own is."""
    _, microbatches, _, share = setting
    for stage, steps in orders(setting):
        buffers: list[set[int]] = [set(), set()]
        for step in steps:
            if isinstance(step, Update):
                batch = range(step.batch * microbatches, (step.batch + 1) * microbatches)
                assert buffers[step.batch % 2] == set(batch)
                buffers[step.batch % 2] = set()
            elif step.kind == "B":
                own = step.micro_batch // microbatches
                assert {other // microbatches for other in buffers[own % 2]} <= {own}
                buffers[own % 2].add(step.micro_batch)
                assert all(buffers) is False or deferral(stage, share) > 0, "one buffer is enough without deferral"
        assert buffers == [set(), set()]


@given(settings())
def test_two_buffers_are_enough(setting: Setting) -> None:
    """Played through with two buffers: every forward and every backward finds the version of the rule in its buffer.

    A version overwritten too early, an update that comes too late, or a third version would show.
    """
    _, microbatches, batches, _ = setting
    for _, steps in orders(setting):
        buffers: list[int | None] = [0, None]
        for step in steps:
            if isinstance(step, Update):
                buffers[buffer_of(step.batch + 1)] = step.batch + 1
            else:
                version = max(step.micro_batch // microbatches - 1, 0)
                assert buffers[buffer_of(version)] == version, f"{step} finds {buffers}"
        assert buffers[buffer_of(batches)] == batches


@given(settings())
def test_an_update_leaves_those_in_flight_alone(setting: Setting) -> None:
    """One micro-batch of the next batch for every stage behind this one; they use the version that the update keeps."""
    pipeline, microbatches, batches, _ = setting
    for stage, steps in orders(setting):
        in_flight: list[int] = []
        for step in steps:
            if isinstance(step, Update):
                assert len(in_flight) == (0 if step.batch == batches - 1 else pipeline - 1 - stage)
                assert {index // microbatches for index in in_flight} <= {step.batch + 1}
                assert {version_of(index, microbatches) for index in in_flight} <= {step.batch}
            elif step.kind == "F":
                in_flight.append(step.micro_batch)
            else:
                in_flight.remove(step.micro_batch)


@given(settings(), st.data())
def test_a_batch_that_drains_leaves_nothing_in_flight(setting: Setting, data: st.DataObject) -> None:
    """Where to stop may be decided when a batch begins: the batches before it are the same."""
    pipeline, microbatches, batches, share = setting
    stop = data.draw(st.integers(1, batches))
    for stage, steps in orders((pipeline, microbatches, stop, share)):
        wait = deferral(stage, share)
        counted = actions(steps)
        assert sum(action.kind == "F" for action in counted) == stop * microbatches == len(counted) / 2
        longer_order = order(pipeline, stage, microbatches, batches, deferral=wait)
        begun = sum(1 + len(batch_order(pipeline, stage, microbatches, batch, deferral=wait)) for batch in range(stop - 1))
        assert steps[:begun] == longer_order[:begun]


@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 1), (4, 3)])
def test_fewer_micro_batches_than_stages(pipeline: int, microbatches: int) -> None:
    with pytest.raises(ConfigError) as refused:
        order(pipeline, 0, microbatches, 2)
    assert str(microbatches) in str(refused.value)
    assert f"at least {pipeline}" in str(refused.value)


@pytest.mark.parametrize("stage", range(1, 9))
def test_what_is_exchanged_behind_an_update_is_needed_behind_it_on_both_sides(stage: int) -> None:
    """The gradient of a stage's last backward before an update, and the input of its next forward: the stage before takes the one
    and makes the other before its own update, or behind it if it defers less."""
    before, ours = (batch_order(9, number, 9, 2, deferral=deferral(number)) for number in (stage - 1, stage))
    made, needed = ours[-1], batch_order(9, stage, 9, 3, deferral=deferral(stage))[0]
    assert (made.kind, needed.kind) == ("B", "F")
    assert (made in before) is (needed in before) is not defers_more_than_before(stage)
