"""Stages on which the host is slower than the device: nothing changes on others, and there fewer halves are touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.anatomy import DENSE
from megatron_lynx.config.loader import job_path, load_job
from megatron_lynx.cost.host import NO_HOST_TIME, half_host_s, setting_of
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.solver.problem import Choices, StageProblem
from megatron_lynx.timeline import Passes
from tests.solver.problems import budgets, every_answer, options, problems, solve

KEPT = Passes(1.0, 1.0)
TOUCHED = Passes(1.5, 3.0)


def hosted(problem: StageProblem, device_s: float, touched: Passes = TOUCHED) -> StageProblem:
    """The same problem where a half that is touched takes the host longer. `device_s`: forward of a layer on the device."""

    def choices(some: Choices) -> Choices:
        return Choices(replace(option, host=touched if option.recompute else KEPT) for option in some)

    seconds = problem.layers * device_s
    return replace(problem.with_choices(choices), device=Passes(seconds, 2 * seconds))


def taken_s(problem: StageProblem, answer) -> float:
    host = sum((half.host for half in answer.halves), start=NO_HOST_TIME)
    return answer.longer_s + host.beyond(problem.device.forward_s, problem.device.backward_s + answer.longer_s)


def touched(answer) -> int:
    return sum(bool(half.recompute) for half in answer.halves)


@settings(max_examples=15)
@given(problems(), st.sampled_from([0.5, 2.0, 4.0, 100.0]))
def test_no_answer_is_slower_than_one_that_forgets_the_host_or_holds_more_than_fits(problem, device_s):
    for one in budgets(hosted(problem, device_s)):
        own, mindful = solve(replace(one, device=None)), solve(one)
        assert taken_s(one, mindful) <= taken_s(one, own) + 1e-9
        assert mindful.peak_bytes <= one.budget_bytes
        assert set(mindful.halves) <= {option for choices in one.halves for option in choices}


@settings(max_examples=15)
@given(problems())
def test_where_the_device_is_slower_the_host_changes_nothing(problem):
    for one in budgets(hosted(problem, 1000.0)):
        assert solve(one).longer_s == pytest.approx(solve(replace(one, device=None)).longer_s)


@settings(max_examples=10)
@given(problems(max_layers=2, most_parts=2))
def test_where_only_the_host_counts_as_few_halves_are_touched_as_fit(problem):
    for one in budgets(hosted(problem, 0.0, touched=Passes(100.0, 200.0))):
        fewest = min(touched(answer) for answer in every_answer(one) if answer.peak_bytes <= one.budget_bytes)
        assert touched(solve(one)) == fewest


def test_without_a_budget_the_least_memory_is_wanted_whatever_the_host_takes():
    problem = hosted(next(iter(budgets(problems_of_two_layers()))), 0.0)
    free = replace(problem, budget_bytes=None)
    assert solve(free) == solve(replace(free, device=None))


def problems_of_two_layers() -> StageProblem:
    some = options([(50, 1.0), (30, 0.5)], 2.0)
    return StageProblem(0, (some, some, some, options([(50, 1.0)], 0.0)), in_flight=2)


@pytest.mark.parametrize(
    ("half", "recompute", "gathered", "setting"),
    [
        ("attention", (), False, "kept"),
        ("attention", ("input_layernorm",), False, "partly"),
        ("mlp", ("pre_mlp_layernorm", "activation"), False, "partly"),
        ("mlp", ("pre_mlp_layernorm", "linear_fc1", "activation"), False, "recomputed"),
        ("attention", ("core_attention",), False, "recomputed"),
        ("mlp", ("pre_mlp_layernorm", "linear_fc1", "activation"), True, "gathered"),
    ],
)
def test_what_becomes_of_a_half_is_its_setting(half, recompute, gathered, setting):
    assert setting_of(DENSE[half], recompute, gathered=gathered) == setting


def test_a_checkpoint_takes_what_recomputing_everything_takes():
    """Its input is gathered as in forward, and not once for its recomputation and its backward."""
    profile = analytic_profile(load_job(job_path("jobs/llama3-70b-h800-80g")))
    assert profile.shape.sequence_parallel
    assert profile.host_time is not None
    section = DENSE["mlp"]
    items, measured = section.run_again(whole=True), profile.host_time.of(profile.shape.implementation).mlp
    for checkpointed, passes in ((True, measured.recomputed), (False, measured.gathered)):
        host = half_host_s(profile, section, items, checkpointed=checkpointed)
        assert host == passes.seconds
