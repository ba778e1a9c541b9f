"""Answers as plans: every seat is accepted and run, and the simulator finds no more held or exposed than was said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.config.job import Budget
from megatron_lynx.config.loader import load_job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import decide
from megatron_lynx.planner.writing import written
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.solver.answer import Share, Solved, SolvedChunks, StageAnswer
from megatron_lynx.solver.options import StageProblems
from megatron_lynx.solver.problem import StageProblem
from megatron_lynx.solver.programme import keep_all
from megatron_lynx.timeline import Passes
from tests.solver.problems import LAYOUTS, catalogued, grouped, least_memory, solve

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@settings(max_examples=2, deadline=None)
@given(share=st.floats(0, 1))
@pytest.mark.slow
def test_never_over_budget_in_the_simulator(name: str, share: float) -> None:
    stages = catalogued(name)
    answers = []
    for stage in range(stages.job.parallel.pipeline):
        problem = stages.of(stage)
        least, most = least_memory(replace(problem, inside=())).peak_bytes, keep_all(problem).peak_bytes
        answers.append(solve(replace(problem, budget_bytes=least + int(share * (most - least)))))
    found = simulated(name, answers)
    for stage, answer in enumerate(answers):
        assert found.memory(stage).peak_bytes <= answer.peak_bytes
        assert found.total(stage, "exposed_s") <= answer.exposed_s * stages.job.microbatches * (1 + 1e-9) + 1e-12


def test_a_group_of_layers_exposes_no_more_than_was_counted() -> None:
    """Its rule named no wait for the rest of its last half: under sequence parallelism its plan exposed 7 % more."""
    stages = catalogued("sequence parallelism")
    offered = [stages.of(stage) for stage in range(stages.job.parallel.pipeline)]
    answers = [solve(replace(problem, budget_bytes=least_memory(problem).peak_bytes)) for problem in offered]
    assert any(grouped(answer) for answer in answers)
    found = simulated("sequence parallelism", answers)
    for stage, answer in enumerate(answers):
        assert found.memory(stage).peak_bytes <= answer.peak_bytes
        assert found.total(stage, "exposed_s") <= answer.exposed_s * stages.job.microbatches * (1 + 1e-9)


def test_a_group_of_dense_layers_and_experts_names_no_wait() -> None:
    """A dense layer without tensor parallelism has no wait, and its plan was refused."""
    job = load_job("jobs/deepseek-v2-lite-h100-80g").model_copy(update={"budget": Budget(memory_gib=34.58)})
    plan = decide(job, analytic_profile(job)).plan
    kinds = [{plan.model.has_experts(layer) for layer in rule.layers} for rule in plan.stages[0].rules]
    assert {True, False} in kinds, "no rule has both"


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_seat_is_one_that_a_plan_accepts(name: str) -> None:
    """The first layers of a stage each have one of the options, the others keep everything."""
    stages = catalogued(name)
    offered = [stages.of(stage) for stage in range(stages.job.parallel.pipeline)]
    plain = [keep_all(problem) for problem in offered]
    for start in range(0, max(len(problem.halves[0].apart) for problem in offered), offered[0].layers - 1):
        answers = [with_options(problem, kept, start) for problem, kept in zip(offered, plain, strict=True)]
        found = simulated(name, answers)
        assert all(found.memory(stage).peak_bytes <= answer.peak_bytes for stage, answer in enumerate(answers))


def with_options(problem: StageProblem, kept: Solved, start: int) -> Solved:
    count = problem.layers - 1
    attention, mlp = (tuple((choices.apart * 2)[start : start + count]) for choices in problem.halves[:2])
    below = list(zip(attention, mlp, strict=False))
    below[1::3] = [(problem.halves[0].joined[0], problem.halves[1].joined[0])] * len(below[1::3])
    last_mlp = problem.halves[-1].apart[start % len(problem.halves[-1].apart)]
    return replace(kept, halves=(*chain.from_iterable(below), *kept.halves[2 * len(below) : -1], last_mlp))


def simulated(name: str, answers: Sequence[Solved]) -> Simulation:
    stages = catalogued(name)
    return rehearse(planned(stages, answers), stages.options.profile, job=stages.job)


def planned(stages: StageProblems, answers: Sequence[Solved]) -> Plan:
    """One chunk on each stage, and nothing on the host."""
    chunks = [
        StageAnswer(stage, SolvedChunks((answer,)), int(answer.in_flight), Share(0.0), Passes(0.0, 0.0), 0.0)
        for stage, answer in enumerate(answers)
    ]
    return written(stages.job, chunks)
