"""Simulated batches without flushes: the documented table, two stages by hand, and what holds for any costs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.errors import ConfigError
from megatron_lynx.schedule.double_buffered import deferral
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.simulator import double_buffered
from megatron_lynx.simulator.double_buffered import simulate_without_flushes
from megatron_lynx.simulator.passes import ChunkPasses, TimedPass
from megatron_lynx.simulator.simulate import simulate
from tests.simulator.by_hand import receiving
from tests.simulator.plain import plain_passes


def even(stages: int) -> list[ChunkPasses]:
    return [plain_passes(0.2, 0.4, resident_bytes=10)] * stages


@pytest.mark.parametrize(
    ("stages", "microbatches", "over_flush"),
    [(2, 2, (0.77, 0.88)), (4, 4, (0.67, 0.86)), (4, 8, (0.79, 0.92))],
)
def test_what_was_measured(stages: int, microbatches: int, over_flush: tuple[float, ...]) -> None:
    """Of docs/double_buffered.md: real processes and messages, passes that sleep."""
    passes = even(stages)
    flush_s = simulate(with_flushes(stages, microbatches), [[each] for each in passes]).step_s
    found = [simulate_without_flushes(microbatches, passes, deferred=deferred).step_s / flush_s for deferred in (True, False)]
    assert found == pytest.approx(over_flush, abs=0.012)


def test_two_stages_and_their_barrier() -> None:
    """F 1 s, B 2 s. Batch 0 ends for stage 1 at 7 s and for stage 0 at 9 s; stage 1 runs a pair of batch 1 meanwhile."""
    run = simulate_without_flushes(2, [plain_passes(1.0, 2.0)] * 2)
    first = [(str(each.action), each.start_s) for each in run.executed[1][:5]]
    assert first == [("0F0", 1.0), ("0B0", 2.0), ("1F0", 4.0), ("1B0", 5.0), ("2F0", 7.0)]
    assert [run.updates[stage][0] for stage in (0, 1)] == [(9.0, 10.0), (10.0, 10.0)]
    assert run.step_s == 7.0
    assert [run.busy_s(stage) for stage in (0, 1)] == [6.0, 6.0]
    assert run.bubble_s(1) == 1.0


def test_an_update_at_once_waits_for_the_gradient_of_the_first_stage() -> None:
    run = simulate_without_flushes(2, [plain_passes(1.0, 2.0)] * 2, deferred=False)
    assert run.step_s == 8.0
    assert run.updates[1][1].begin_s - run.updates[1][1].arrived_s == 2.0


@pytest.mark.parametrize(("backward_s", "bound"), [(1.5, 0.025), (2.0, 0.0), (2.5, 0.03), (3.0, 0.03)])
def test_two_backwards_for_three_stages_is_near_the_best(
    monkeypatch: pytest.MonkeyPatch, backward_s: float, bound: float
) -> None:
    """Nearly the best of all numbers of deferred backwards. Forwards take 1 s."""

    def step_s(stages: int, share: float) -> float:
        monkeypatch.setattr(double_buffered, "deferral", lambda stage: deferral(stage, share))
        return simulate_without_flushes(stages, [plain_passes(1.0, backward_s)] * stages).step_s

    for stages in (2, 4, 8):
        best = min(step_s(stages, share / 10) for share in range(3, 11))
        assert step_s(stages, 2 / 3) <= best * (1 + bound) + 1e-9


@pytest.mark.parametrize("deferred", [True, False])
def test_messages_are_behind_passes(deferred: bool) -> None:
    """Four stages, four micro-batches, messages a quarter of a forward: nothing like what flushes lose by them."""
    steps = [simulate_without_flushes(4, even(4), p2p_s, deferred=deferred).step_s for p2p_s in (0.0, 0.05)]
    flushed = [simulate(with_flushes(4, 4), [[each] for each in even(4)], p2p_s).step_s for p2p_s in (0.0, 0.05)]
    assert steps[1] - steps[0] < flushed[1] - flushed[0]


def test_no_more_micro_batches_in_flight_than_with_flushes() -> None:
    run = simulate_without_flushes(4, even(4))
    assert [run.memory(stage).peak_bytes for stage in range(4)] == [40, 30, 20, 10]


def test_a_receive_hides_recomputations() -> None:
    plain = plain_passes(1.0, 2.0)
    recomputing = receiving(plain, TimedPass(0.25, hidden_s=0.25))
    run = simulate_without_flushes(2, [recomputing, plain], p2p_s=0.3)
    assert run.total(0, "hidden_s") + run.total(0, "exposed_s") == pytest.approx(0.5)


def test_the_timeline_has_updates_and_waits_side_by_side() -> None:
    run = simulate_without_flushes(4, even(4), p2p_s=0.05)
    for stage, spans in run.timeline().ranks.items():
        beside = sorted(
            (span for span in spans if span.kind in ("recv", "update", "forward", "backward")), key=lambda s: s.start_s
        )
        assert all(one.end_s <= after.start_s + 1e-9 for one, after in pairwise(beside)), stage
    assert {span.name for spans in run.timeline().ranks.values() for span in spans if span.kind == "update"} > {"update 2"}


def test_too_few_micro_batches() -> None:
    with pytest.raises(ConfigError) as caught:
        simulate_without_flushes(3, even(4))
    assert "3" in str(caught.value)
    assert "at least 4" in str(caught.value)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[ChunkPasses], int, float, bool]:
    seconds = st.integers(1, 8).map(lambda eighths: eighths / 8)
    passes = draw(st.lists(st.builds(plain_passes, seconds, seconds), min_size=2, max_size=5))
    microbatches = draw(st.integers(len(passes), len(passes) + 4))
    return passes, microbatches, draw(st.sampled_from([0.0, 0.125])), draw(st.booleans())


@settings(max_examples=40, deadline=None)
@given(runs())
def test_a_batch_takes_at_least_its_slowest_stage_and_updates_in_order(
    run: tuple[list[ChunkPasses], int, float, bool],
) -> None:
    passes, microbatches, p2p_s, deferred = run
    found = simulate_without_flushes(microbatches, passes, p2p_s, deferred=deferred)
    busy_s = [microbatches * (each.one("F", "steady").seconds + each.one("B", "steady").seconds) for each in passes]
    assert found.step_s >= max(busy_s) - 1e-9
    assert [found.busy_s(stage) for stage in range(len(passes))] == pytest.approx(busy_s)
    assert all(len({stage[batch].begin_s for stage in found.updates}) == 1 for batch in range(double_buffered.BATCHES))


@settings(max_examples=40, deadline=None)
@given(runs())
def test_the_steady_state_is_steady(run: tuple[list[ChunkPasses], int, float, bool]) -> None:
    passes, microbatches, p2p_s, deferred = run
    steps = []
    for batches in (double_buffered.BATCHES, 8, 9):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(double_buffered, "BATCHES", batches)
            steps.append(simulate_without_flushes(microbatches, passes, p2p_s, deferred=deferred).step_s)
    assert steps == pytest.approx([steps[0]] * 3)
