"""Recomputations that share the receive of cool-down: less exposed, no more held than the budget, and shorter steps in the
simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.solver import sweep
from megatron_lynx.solver.answer import Solved
from megatron_lynx.solver.baselines import keep_all, of_policy
from megatron_lynx.solver.chunks import with_shared_receive
from megatron_lynx.solver.options import StageProblems
from megatron_lynx.solver.problem import StageProblem
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.profiler.made_up import made_up_profile
from tests.solver.problems import LAYOUTS, catalogued
from tests.solver.test_in_plans import planned, simulated
from tests.transparency.trials import Trial, compare_with_stock


def problems_of(name: str, share: float) -> list[StageProblem]:
    stages = catalogued(name)
    problems = [stages.of(stage) for stage in range(stages.job.parallel.pipeline)]
    least, most = [sweep.least_memory(one).peak_bytes for one in problems], [keep_all(one).peak_bytes for one in problems]
    return [
        replace(one, budget_bytes=low + int(share * (high - low))) for one, low, high in zip(problems, least, most, strict=True)
    ]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@settings(max_examples=4, deadline=None)
@given(share=st.floats(0, 1))
def test_within_the_budget_and_no_slower_in_the_simulator(name: str, share: float) -> None:
    problems = problems_of(name, share)
    alone = [sweep.solve(problem) for problem in problems]
    shared = [with_shared_receive(problem, answer) for problem, answer in zip(problems, alone, strict=True)]
    before, after = simulated(name, alone), simulated(name, shared)
    for stage, (problem, less, more) in enumerate(zip(problems, alone, shared, strict=True)):
        assert more.exposed_s <= less.exposed_s
        assert after.memory(stage).peak_bytes <= more.peak_bytes <= problem.budget_bytes
        assert more.resident_bytes == less.resident_bytes
    assert after.step_s <= before.step_s * (1 + 1e-9)


def test_without_tensor_parallelism_cool_down_hides_what_it_recomputes() -> None:
    problem = catalogued("no tensor parallelism").of(0)
    recomputing = of_policy(problem, "full")
    shared = with_shared_receive(replace(problem, budget_bytes=keep_all(problem).peak_bytes), recomputing)
    assert problem.receive is not None
    room_s = problem.receive.seconds / problem.receive.interference
    halves = list(recomputing.halves)[::-1]
    fitting = [half for count, half in enumerate(halves, 1) if sum(one.recompute_s for one in halves[:count]) <= room_s]
    assert 2 < len(fitting) < len(halves)
    hidden_s = problem.receive.share * sum(half.recompute_s for half in fitting)
    assert shared.exposed_s == pytest.approx(recomputing.exposed_s - hidden_s)


def test_training_recomputes_several_halves_in_one_receive(pool_of: Callable[[int], RankPool]) -> None:
    job = tiny_job("gpt", pipeline=2, microbatches=3)
    stages = StageProblems(job, made_up_profile(job, link_s=1.0))
    first, last = stages.of(0), stages.of(1)
    answer = with_shared_receive(replace(first, budget_bytes=keep_all(first).peak_bytes), of_policy(first, "full"))
    plan = planned(stages, [answer, keep_all(last)])
    (stock, *_), *_ = pool_of(2).run(compare_with_stock, job, [plan], Trial(steps=1, traced=True))
    assert stock.differing == []
    received = [event for event in stock.planned.events if event["kind"] == "recompute" and event["window"] == RECV_BACKWARD]
    assert [(event["micro_batch"], event["layer"], event["half"]) for event in received] == [
        (2, 2, "mlp"),
        (2, 2, "attention"),
        (2, 1, "mlp"),
        (2, 1, "attention"),
    ]


def test_the_last_stage_and_problems_without_a_budget_are_left_as_they_are() -> None:
    stages = catalogued("no tensor parallelism")
    for problem in (stages.of(0), replace(stages.of(7), budget_bytes=10**12)):
        answer: Solved = of_policy(problem, "full")
        assert with_shared_receive(problem, answer) is answer
