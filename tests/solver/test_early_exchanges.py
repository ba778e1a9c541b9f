"""Replays while tokens travel in forwards: where they are offered, what they hold, when a plan has them, and that they train."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.config import Job
from megatron_lynx.plan.experts import replays_beside_forwards
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.solver.answer import Solved, layers_of
from megatron_lynx.solver.options import StageProblems
from megatron_lynx.solver.problem import Choices, Option, StageProblem
from megatron_lynx.testbed.ranks import RankPool
from tests.config.jobs import catalogued_job
from tests.plan.strategies import drawn, plans_for
from tests.solver.test_exchanges import qwen3
from tests.solver.test_in_plans import planned
from tests.transparency import test_experts
from tests.transparency.trials import Trial, compare_with_stock


def early_windows(choices: Choices) -> set[str]:
    """The windows of forwards in which replays begin."""
    return {
        option.seat.steady[0].window for option in choices if option.memory.early and is_forward(option.seat.steady[0].window)
    }


def of_stage(job: Job, stage: int, chunks: tuple[int, ...] | None = None) -> list[set[str]]:
    """Of the attention half below experts, of experts, and of the stage's last ones."""
    mixed = StageProblems(job, analytic_profile(job)).of(stage, chunks=chunks).mixed
    assert mixed is not None
    attention, experts, *_, last = (half.choices for half in mixed.halves[-4:])
    return [early_windows(kind) for kind in (attention, experts, last)]


NOWHERE: list[set[str]] = [set(), set(), set()]
FIRST_AND_LAST = [{"fwd.mlp.0"}, {"fwd.mlp.2"}, {"fwd.mlp.2"}]


def test_the_first_exchange_hides_the_attention_below_and_the_last_one_the_experts() -> None:
    """Each window is offered to one half. On the last stage a micro-batch's own forward comes before its backward."""
    assert of_stage(qwen3(), 0) == FIRST_AND_LAST
    assert of_stage(qwen3(), 1) == NOWHERE
    assert of_stage(qwen3(expert=1), 0) == NOWHERE
    windows = {
        option.seat.steady.window
        for option in StageProblems(qwen3(), analytic_profile(qwen3())).of(0).mixed.halves[0].choices  # type: ignore[union-attr]
    }
    assert "fwd.mlp.0 until rotary then bwd.mlp.2" in windows, "begun there and gone on with in the backward"


def test_with_chunks_all_layers_have_experts() -> None:
    """The forward may be another chunk's: where layers of experts lie elsewhere in it, a plan could not name a window."""
    chunked = qwen3(layers_per_chunk=12)
    assert of_stage(chunked, 0) == FIRST_AND_LAST
    experts = chunked.model.experts.model_copy(update={"layers": ("2-48",)})  # type: ignore[union-attr]
    some = chunked.model_copy(update={"model": chunked.model.model_copy(update={"experts": experts})})
    assert of_stage(some, 0) == NOWHERE


def test_with_tensor_parallelism_the_attention_keeps_its_own_windows() -> None:
    job = qwen3(tensor=2, sequence_parallel=True, expert_tensor=1)
    attention, experts, _ = of_stage(job, 0)
    assert attention == {"fwd.attention.0", "fwd.attention.1", "fwd.mlp.0"}
    assert experts == {"fwd.mlp.2"}


def tiny() -> tuple[Job, Profile]:
    """A job of four ranks that this machine can run, whose exchanges outlast all replays."""
    job = test_experts.job_of("PP2, EP2")
    priced = job.model_copy(update={"cluster": catalogued_job("gpt-22b", "h800-80g").cluster})
    profile = analytic_profile(priced)
    assert profile.experts is not None
    return priced, profile.model_copy(update={"experts": profile.experts.model_copy(update={"exchange_s": 1.0})})


def solved(problem: StageProblem, chosen: Callable[[Choices], Option]) -> Solved:
    return Solved(layers_of([chosen(choices) for choices in problem.halves]), problem.in_flight)


def test_every_seat_is_one_that_a_plan_accepts_and_holds_no_more_than_was_said() -> None:
    job, profile = tiny()
    stages = StageProblems(job, profile)
    last = solved(stages.of(1), lambda choices: choices[0])
    problem = stages.of(0)
    for number in range(max(map(len, problem.halves))):
        answer = solved(problem, lambda choices, number=number: choices.apart[number % len(choices.apart)])  # type: ignore[misc]
        found = rehearse(planned(stages, [answer, last]), profile)
        assert found.memory(0).peak_bytes <= answer.peak_bytes
        assert min(found.memory(0).bytes) >= 0
        assert found.exposed_replay_s(0) <= answer.exposed_s * job.microbatches * (1 + 1e-9) + 1e-12


@pytest.mark.slow
def test_whatever_a_plan_says_of_them_memory_comes_back() -> None:
    """Of drawn plans, among them some that replay in exchanges of forwards what other windows go on with, or nobody waits for."""
    job, profile = tiny()
    early: list[bool] = []

    @drawn(30)
    @given(plans_for(job))
    def check(plan: Plan) -> None:
        early.append(replays_beside_forwards(plan))
        for stage in range(2):
            held = rehearse(plan, profile).memory(stage).bytes
            assert min(held) >= 0 == held[-1]

    check()
    assert any(early)


def test_training_replays_while_tokens_of_later_micro_batches_travel(pool_of: Callable[[int], RankPool]) -> None:
    """Losses, gradients and weights to the bit. Of the steady micro-batches every replay of the first stage is where it was
    seated, wholly or begun there."""
    job, profile = tiny()
    stages = StageProblems(job, profile)
    kept = solved(stages.of(1), lambda choices: choices[0])
    answers = [[solved(stages.of(0), early(begun)), kept] for begun in (False, True)]
    plans = [planned(stages, each) for each in answers]
    assert all(map(replays_beside_forwards, plans))
    trial = Trial(training={"ddp": True, "optimizer": "megatron"}, steps=1, traced=True, counted=True)
    for rank, outcomes in enumerate(pool_of(4).run(compare_with_stock, test_experts.job_of("PP2, EP2"), plans, trial)):
        for outcome, begun in zip(outcomes, (False, True), strict=True):
            assert outcome.differing == []
            assert outcome.planned.frames_left == 0
            assert outcome.planned.collectives == outcome.stock.collectives, "in kind and order"
            replays = [event for event in outcome.planned.events if event["kind"] == "replay" and event["micro_batch"] < 3]
            windows = {(event["half"], event["window"].partition("@")[0]) for event in replays}
            expected = {("attention", "fwd.mlp.0"), ("mlp", "fwd.mlp.2"), *([("attention", "bwd.mlp.2")] if begun else [])}
            assert windows == (expected if rank < 2 else set())


def early(begun: bool) -> Callable[[Choices], Option]:
    """The option that replays most in exchanges of forwards; of attention halves, where that is asked for, goes on in the
    backward."""

    def chosen(choices: Choices) -> Option:
        seated = [option for option in choices if option.memory.early and is_forward(option.seat.steady[0].window)]
        return max(seated, key=lambda option: ((len(option.seat.steady) > 1) == begun, len(option.replay)))

    return chosen
