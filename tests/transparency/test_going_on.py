"""A checkpointed half runs again as far as it communicates, and goes on in the first wait of its own backward.

Losses and gradients equal stock's in every bit; as much is communicated as without; and the rest of the half runs while what
backward waits for travels, whoever waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.timetable import Task
from tests.apply.on_ranks import refused
from tests.long import long
from tests.tiny_jobs import tiny_job
from tests.transparency import test_flex
from tests.transparency.checkpoints import with_rest_in_wait, without_beginning
from tests.transparency.test_ahead import begun, held_up, late
from tests.transparency.test_every_bit import LAYOUTS, checked
from tests.transparency.test_experts import job_of, trial_of
from tests.transparency.timeline import timelines
from tests.transparency.trials import Trial

Pools = Callable[[int], RankPool]
DRY = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
BOTH = ("attention", "mlp")


@pytest.mark.parametrize("layout", ["TP2+SP", *long("TP2xPP2xVPP2+SP")])
@pytest.mark.parametrize("like", ["llama", *long("gpt")])
def test_a_gradient_is_gathered_beside_the_rest_of_a_half(pool_of: Pools, layout: str, like: Any) -> None:
    """On demand, ahead, ahead from a gather on, in each half by itself, and in groups of layers."""
    job = tiny_job(like, **LAYOUTS[layout], **DRY)
    plans = [late(job), with_rest_in_wait(late(job)), with_rest_in_wait(begun(job)), with_rest_in_wait(begun(job, how="gather"))]
    plans += [
        with_rest_in_wait(late(job, "halves"), BOTH),
        with_rest_in_wait(late(job, {"layers": 2})),
        with_rest_in_wait(late(job, layers=(1, 2))),
    ]
    for outcomes in checked(pool_of, job, plans, Trial(counted=True)):
        first, *others = (Counter(outcome.planned.collectives) for outcome in outcomes)
        assert all(other == first for other in others[:3])


def test_a_gradient_that_dropout_changes_is_gathered_where_backward_comes_to_it(pool_of: Pools) -> None:
    """What was gathered beside the half is of no use then, and everything is as without."""
    job = tiny_job("gpt", **LAYOUTS["TP2+SP"])
    times = job.model.layers * job.microbatches
    for plain, gone_on in checked(pool_of, job, [late(job), with_rest_in_wait(late(job))], Trial(counted=True)):
        more = Counter(gone_on.planned.collectives) - Counter(plain.planned.collectives)
        assert sum(more.values()) == times * len(gone_on.planned.counts), more


@pytest.mark.parametrize("layout", ["EP2", *long("PP2xVPP2, EP2")])
def test_the_rest_of_experts_runs_while_gradients_travel(pool_of: Pools, layout: str) -> None:
    """With dropout backward reads its mask before, and the rest runs there."""
    trial = trial_of(model={"moe_aux_loss_coeff": 0.01, "moe_router_enable_expert_bias": False})
    for model in (DRY, {}):
        job = job_of(layout, **model)
        plans = [
            begun_late(job),
            with_rest_in_wait(begun_late(job)),
            with_rest_in_wait(begun(job)),
            with_rest_in_wait(begun(job, "mlp")),
        ]
        for outcomes in checked(pool_of, job, plans, trial):
            first, *others = (Counter(outcome.planned.collectives) for outcome in outcomes)
            assert all(other == first for other in others)


def begun_late(job: Job) -> Plan:
    """All layers are checkpoints, and nothing begins ahead; exchanges are windows."""
    return without_beginning(begun(job))


def test_what_deepep_brings_back_travels_beside_the_rest(pool_of: Pools) -> None:
    """Outputs of its stand-in are NaN until they were waited for."""
    job = test_flex.job_of("EP2", "deepep", shared_ffn=32)
    job = job.model_copy(update={"model": job.model.model_copy(update=DRY)})
    checked(pool_of, job, [with_rest_in_wait(begun(job)), with_rest_in_wait(begun(job, "mlp"))], trial_of(steps=3))


TRAVELS: dict[str, tuple[Callable[[], Job], str, int]] = {
    "TP2+SP": (lambda: tiny_job("llama", tensor=2, layers=2, microbatches=1, sequence_parallel=True), "all_gather_single", 2),
    "EP2": (lambda: job_of("EP2", **DRY), "all_to_all_single", 3),
}


@pytest.mark.parametrize("layout", TRAVELS)
def test_the_rest_runs_between_an_issue_and_its_wait(pool_of: Pools, layout: str) -> None:
    """The gather of a gradient is issued before anybody waits for that of the input, and waited for behind the rest; gradients of
    what experts returned travel behind tokens and probabilities, and whoever waits for them has computed before."""
    made, work, held = TRAVELS[layout]
    job = made()
    plain = begun_late(job) if job.model.experts else late(job)
    for of_rank in pool_of(job.gpus).run(timelines, job, [with_rest_in_wait(plain), plain], {"ddp": True}, {}):
        halves = job.model.layers * job.microbatches
        first, second = (held_up(timeline, work) for timeline in of_rank)
        assert first - second == held * halves
        recomputations = [
            event for event in of_rank[0].events if event.what == "recompute" and event.window.startswith("bwd.mlp.0")
        ]
        assert len(recomputations) == halves


def test_where_it_goes_on_is_its_own_first_wait() -> None:
    """What begins ahead leaves nothing for where backward enters the half. Of a group of layers the last half goes on."""
    dense = tiny_job("llama", **LAYOUTS["TP2+SP"])
    experts = job_of("EP2", **DRY)
    for plan, behind, on_entry in (
        (with_rest_in_wait(late(dense)), "linear_fc1", True),
        (with_rest_in_wait(begun(dense)), "linear_fc1", True),
        (with_rest_in_wait(begun_late(experts)), "dispatch", True),
        (with_rest_in_wait(begun(experts)), "dispatch", False),
    ):
        backward = timetable_of(plan, 0).backward(0)
        mlp = backward.halves[2]
        assert backward.at("in", mlp.waits[0].window) == (Task("recompute", mlp.half, since=behind),)
        *_, last = backward.at("enter", mlp.half) or (None,)
        assert last == (Task("begin", mlp.half, behind) if on_entry else None)
    backward = timetable_of(with_rest_in_wait(late(dense, {"layers": 2})), 0).backward(0)
    in_first = [backward.at("in", half.waits[0].window) for half in backward.halves]
    assert [bool(tasks) for tasks in in_first] == [True, False, False, False] * 2


def test_what_cannot_go_on_is_refused_by_name() -> None:
    """All at once, and with what to do."""
    tp, cut = tiny_job("llama", **LAYOUTS["TP2"]), tiny_job("llama", **LAYOUTS["TP2+SP"])
    with pytest.raises(ValueError, match=r"windows\.mlp is bwd\.mlp\.0, .* no gradient travels there: layers 1-4"):
        with_rest_in_wait(late(tp))
    with pytest.raises(ValueError, match=r"windows\.attention is .*: the attention half runs again whole"):
        with_rest_in_wait(late(cut), BOTH)
    raw = late(cut).model_dump(mode="json", exclude_defaults=True)
    raw["stages"][0]["rules"][0]["windows"] = {"mlp": "bwd.attention.0+1"}
    with pytest.raises(ValueError, match=r"it runs again where backward enters it, at most to bwd\.mlp\.0"):
        Plan.model_validate(raw)


def test_experts_that_are_cut_exchange_rows_once_more(pool_of: Pools) -> None:
    """Where tensor-parallel ranks share one expert the rest communicates, which nothing may in a wait (rule R2)."""
    job = job_of("TP2+SP, EP2, every second layer", **DRY)
    layout = job.parallel.model_copy(update={"expert_tensor": 2})
    cut = job.model_copy(update={"parallel": layout, "gpus": 4})
    plan = with_rest_in_wait(without_beginning(begun(job, "mlp", job.model.expert_layers)))
    for refusal in pool_of(cut.gpus).run(refused, cut, plan):
        assert refusal.changed == []
        assert "config.expert_tensor_parallel_size: found 2, needed 1 where the rest" in str(refusal.error)
