"""What ranks really run, and what is simulated, is what the timetable of a plan says: for plans drawn at random.

Both read the same events, so there is nothing that could differ but whether each of them does all of it, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.config.job import Job
from megatron_lynx.cost.section import Prices
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.rehearsal import rehearse, treated_halves
from megatron_lynx.schedule.schedule import Action
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.timetable import HalfPass, Linear, Pass, Task, Timetable
from tests.plan.strategies import drawn, plans_for, samples
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job
from tests.transparency.expected import lets_go, schedule_of
from tests.transparency.trials import Trial, compare_with_stock

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp+sp+pp": {"tensor": 2, "sequence_parallel": True, "pipeline": 2, "microbatches": 3, "layers": 4},
    "chunks": {"tensor": 2, "pipeline": 2, "layers": 6, "microbatches": 4, "partition": (1, 2, 2, 1)},
}
JOBS = {name: tiny_job("llama", **layout) for name, layout in LAYOUTS.items()}
SECONDS_OF_A_MESSAGE = 1e4
"""Far longer than any recomputation, so that all that a window hides fits into it."""

Event = tuple[Task, str]
"""What runs, and where."""


def passes(
    plan: Plan, job: Job, stage: int, timetable: Timetable
) -> Iterator[tuple[Action, int | None, list[Event], list[Event]]]:
    """The passes of a stage in a step; whose recomputations each runs, what it runs, and what runs while its gradient is
    received."""
    for action, _ in schedule_of(job).phases(stage):
        if action.kind == "F":
            through = timetable.forward(action.chunk)
            yield action, None, [one for half in through.halves for one in run_in(through, half)], []
            continue
        through, ran = timetable.backward(action.chunk), []
        for half in through.halves:
            entered = (*through.at("demand", half.half), *through.at("enter", half.half))
            first, *others = [list(run_in(through, half._replace(waits=(wait,)))) for wait in half.waits] or [[]]
            core = [(task, ON_DEMAND) for task in through.at("core", half.half)]
            ran += [*((task, ON_DEMAND) for task in entered), *first, *core, *(one for each in others for one in each)]
        last = (stage, action.chunk) == (plan.parallel.pipeline - 1, plan.parallel.chunks - 1)
        received = timetable.receive(action.chunk).at("in", RECV_BACKWARD)
        yield action, action.micro_batch, ran, [] if last else [(task, RECV_BACKWARD) for task in received]


def run_in(through: Pass, half: HalfPass) -> Iterator[Event]:
    for wait in half.waits:
        yield from ((task, str(wait.window)) for task in through.at("in", wait.window))
        yield from ((task, ON_DEMAND) for task in through.at("after", wait.window) if task.do != "gather")


def recompute_s_of(events: list[Event]) -> Iterator[Event]:
    return ((each, window) for each, window in events if each.do != "weight_gradient")


@pytest.mark.parametrize("layout", JOBS)
@drawn(8)
@given(data=st.data())
@pytest.mark.slow
def test_what_is_simulated_is_the_timetable(layout: str, data: st.DataObject) -> None:
    """Pass by pass and in its order."""
    job = JOBS[layout]
    plan, profile = data.draw(plans_for(job, defers=True, checkpoints=True)), made_up_profile(job, SECONDS_OF_A_MESSAGE)
    simulation, prices = rehearse(plan, profile), Prices(profile)
    for stage, executed in enumerate(simulation.executed):
        timetable = timetable_of(plan, stage)
        entries = zip(plan.chunks_of(stage), timetable.chunks, strict=True)
        halves = {half.planned.key: half for entry, planned in entries for half in treated_halves(entry, planned, prices)}
        received = {each.action[::2]: each.content for each in executed if each.action.kind == "R"}
        by_action = {each.action: each.content for each in executed if each.action.kind != "R"}
        for action, _, ran, while_received in passes(plan, job, stage, timetable):
            contents = [(by_action[action], ran), (received.get(action[::2]) if action.kind == "B" else None, while_received)]
            for content, expected in contents:
                spans = () if content is None else content.spans
                found = [((span.layer, span.half), span.window) for span in spans if span.kind == "recompute"]
                takes_time = (
                    (recompute.half, window)
                    for recompute, window in recompute_s_of(expected)
                    if halves[recompute.half].part(recompute).seconds
                )
                assert found == list(takes_time)
                filled = {(span.layer, span.half, span.window) for span in spans if span.kind == "weight_gradient"}
                assert {one for one in filled if one[2] != "flushed"} <= linears_in(expected)


def linears_in(events: list[Event]) -> set[tuple[int, str, str]]:
    linears: list[tuple[Linear, str]] = [(each.linear, window) for each, window in events if each.do == "weight_gradient"]
    return {(linear.layer, linear.half, window) for linear, window in linears}


@pytest.mark.parametrize("layout", JOBS)
def test_what_ranks_run_is_the_timetable(pool_of: Callable[[int], RankPool], layout: str) -> None:
    """Of every micro-batch, every recomputation in its window or on demand, and no weight gradient in another wait than one of
    its own."""
    job = JOBS[layout]
    [plan] = samples(plans_for(job, defers=True).filter(lambda plan: any(stage.defers for stage in plan.stages)), 1)
    trial = Trial(steps=1, traced=True, training={"ddp": True}, model={"gradient_accumulation_fusion": True})
    results = pool_of(job.gpus).run(compare_with_stock, job, [plan], trial)
    for rank, outcomes in enumerate(results):
        stage = rank // job.parallel.tensor
        events = outcomes[0].planned.events
        found = sorted(
            (event["micro_batch"], event["layer"], event["half"], event["window"])
            for event in events
            if event["kind"] == "recompute"
        )
        entry_of = {layer: entry for entry in plan.chunks_of(stage) for layer in entry.layers}
        expected, linears = [], set[tuple[int, str, str]]()
        for _, micro_batch, ran, while_received in passes(plan, job, stage, timetable_of(plan, stage)):
            both = [*ran, *while_received]
            expected += [
                (micro_batch, *recompute.half, window)
                for recompute, window in recompute_s_of(both)
                if lets_go(job, entry_of[recompute.half[0]], *recompute.half)
            ]
            linears |= linears_in(both)
        assert found == sorted(expected), f"rank {rank}"
        filled = {(event["layer"], event["half"], event["window"]) for event in events if event["kind"] == "weight_gradient"}
        assert {one for one in filled if one[2] != "flushed"} <= linears
