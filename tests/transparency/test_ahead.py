"""What checkpoints communicate begins ahead: it travels while the layer above runs backward, and is not used before it came.

Losses and gradients equal stock's in every bit, dropout included; as much is communicated as without; and what travels is waited
for behind work of the half above, not at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.anatomy.address import WindowAddress
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.timetable import Task
from tests.long import long
from tests.tiny_jobs import tiny_job
from tests.transparency import test_flex
from tests.transparency.checkpoints import ahead, checkpointed
from tests.transparency.plans import plan_for
from tests.transparency.test_checkpoints import EXPERTS
from tests.transparency.test_every_bit import LAYOUTS, checked
from tests.transparency.test_experts import job_of, trial_of
from tests.transparency.timeline import timelines
from tests.transparency.trials import Trial

Pools = Callable[[int], RankPool]


def late(job: Job, checkpoint: Any = "layer", layers: Any = None) -> Plan:
    return checkpointed(plan_for(job, lambda layer: ()), checkpoint, layers)


def begun(job: Job, checkpoint: Any = "layer", layers: Any = None, how: Any = True) -> Plan:
    return ahead(late(job, checkpoint, layers), expert=job.parallel.expert, how=how)


@pytest.mark.parametrize("like", ["gpt", *long("llama")])
@pytest.mark.parametrize("layout", ["TP2", "TP2+SP", *long("TP2xPP2xVPP2+SP")])
def test_what_attention_returns_is_reduced_ahead(pool_of: Pools, layout: str, like: Any) -> None:
    """As many collectives as on demand. The top layer of a chunk has nothing above it."""
    job = tiny_job(like, **LAYOUTS[layout])
    plans = [begun(job), late(job), begun(job, layers=(2, 3))]
    for outcomes in checked(pool_of, job, plans, Trial(counted=True)):
        first, second, some = (outcome.planned for outcome in outcomes)
        assert Counter(first.collectives) == Counter(second.collectives)
        if layout != "TP2xPP2xVPP2+SP":
            times = job.microbatches
            assert [one.counts[-1].ahead for one in (first, second, some)] == [(job.model.layers - 1) * times, 0, 2 * times]


@pytest.mark.parametrize("like", ["gpt", *long("llama")])
@pytest.mark.parametrize("layout", ["TP2xPP2+SP", *long("TP2+SP", "TP2xPP2xVPP2+SP")])
def test_the_input_of_an_attention_is_gathered_ahead(pool_of: Pools, layout: str, like: Any) -> None:
    """As many collectives as on demand: backward gathers again. Chunks have layers above them that are no checkpoints, and the
    top one has none."""
    job = tiny_job(like, **LAYOUTS[layout])
    plans = [begun(job, how="gather"), late(job), begun(job, layers=(1, 3), how="gather"), lowest_begun(job, "gather")]
    for rank, outcomes in enumerate(checked(pool_of, job, plans, Trial(counted=True))):
        first, second, *others = (outcome.planned for outcome in outcomes)
        assert Counter(first.collectives) == Counter(second.collectives) == Counter(others[-1].collectives)
        stage = rank // (job.gpus // job.parallel.pipeline)
        for plan, of_plan in zip(plans, (first, second, *others), strict=True):
            counts = of_plan.counts[-1]
            assert (counts.gathered, counts.ahead) == (0, job.microbatches * begun_in(plan, stage)), f"rank {rank}"


def lowest_begun(job: Job, how: Any) -> Plan:
    """A plan in which the lowest layer of each chunk begins ahead, beside others that are checkpoints as well."""
    raw = late(job).model_dump(mode="json", exclude_defaults=True)
    for stage in raw["stages"]:
        (rule,) = stage["rules"]
        lowest, *others = map(int, str(rule["layers"]).split("-"))
        above = [{**rule, "layers": last if last - lowest == 1 else f"{lowest + 1}-{last}"} for last in others]
        stage["rules"] = [{**rule, "layers": lowest, "ahead": how}, *above]
    return Plan.model_validate(raw)


def begun_in(plan: Plan, stage: int) -> int:
    """How often something begins ahead for one micro-batch."""
    timetable = timetable_of(plan, stage)
    passes = (timetable.backward(chunk) for chunk in range(len(timetable.chunks)))
    moments = ((moment, task) for each in passes for moment, tasks in each.tasks.items() for task in tasks)
    return sum(task.do == "begin" and task.half != moment.place for moment, task in moments)


@pytest.mark.parametrize("layout", ["EP2", *long("TP2+SP, EP2, every second layer", "PP2xVPP2, EP2")])
def test_tokens_are_dispatched_ahead(pool_of: Pools, layout: str) -> None:
    """As the router decided; routers' state, auxiliary losses and bias are stock's."""
    job, trial = job_of(layout), EXPERTS[layout]
    trial.training, trial.counted = {"ddp": True, "optimizer": "megatron"}, True
    plans = [begun(job), late(job), begun(job, "mlp"), begun(job, "halves")]
    if "SP" in layout:
        plans.append(begun(job, how="gather"))  # of layers without experts, behind those with them
    for rank, outcomes in enumerate(checked(pool_of, job, plans, trial)):
        first, second, *others = (outcome.planned for outcome in outcomes)
        assert Counter(first.collectives) == Counter(second.collectives)
        if "SP" in layout:
            assert Counter(others[-1].collectives) == Counter(second.collectives), rank
            assert others[-1].counts[-1].ahead == job.microbatches * begun_in(plans[-1], 0) > first.counts[-1].ahead
        if layout == "EP2":
            times = (job.model.layers - 1) * job.microbatches
            assert [one.counts[-1].ahead for one in (first, second, *others)] == [times, 0, times, times]


def test_what_travels_by_deepep_is_not_used_before_it_is_there(pool_of: Pools) -> None:
    """Outputs of its stand-in are NaN until they were waited for."""
    job = test_flex.job_of("EP2", "deepep", shared_ffn=32)
    for outcomes in checked(pool_of, job, [begun(job), begun(job, "mlp")], trial_of(steps=3)):
        assert [outcome.planned.counts[-1].ahead for outcome in outcomes] == [job.microbatches] * 2


SP = {"tensor": 2, "layers": 2, "microbatches": 1, "sequence_parallel": True}
TRAVELS: dict[str, tuple[Callable[[], Job], str, Any]] = {
    "TP2": (lambda: tiny_job("gpt", tensor=2, layers=2, microbatches=1), "allreduce", True),
    "TP2+SP": (lambda: tiny_job("gpt", **SP), "reduce_scatter_single", True),
    "TP2+SP, behind a gather": (lambda: tiny_job("gpt", **SP), "reduce_scatter_single", "gather"),
    "TP2+SP, a gather": (lambda: tiny_job("gpt", **SP), "all_gather_single", "gather"),
    "EP2": (lambda: job_of("EP2"), "all_to_all_single", True),
}


@pytest.mark.parametrize("layout", TRAVELS)
def test_it_travels_while_the_half_above_runs_backward(pool_of: Pools, layout: str) -> None:
    """Between its issue and the wait for it stock's own collectives of the half above are issued, its backward comes to its core
    attention, or it ends: on demand the wait is the very next thing."""
    made, work, how = TRAVELS[layout]
    job = made()
    for of_rank in pool_of(job.gpus).run(timelines, job, [begun(job, how=how), late(job)], {"ddp": True}, {}):
        first, second = (held_up(timeline, work) for timeline in of_rank)
        assert first - second == (job.model.layers - 1) * job.microbatches * (2 if work.startswith("all_to") else 1)


def held_up(timeline: Any, name: str) -> int:
    """How many works of this name are not waited for at once."""
    events = timeline.events
    issued = {event.work: place for place, event in enumerate(events) if event.what == "issued" and event.name == name}
    waited = {event.work: place for place, event in reversed(list(enumerate(events))) if event.what == "waited"}
    return sum(any(one.what != "waited" for one in events[place + 1 : waited[work]]) for work, place in issued.items())


GATHER = WindowAddress("bwd", 4, "attention", 0)
"""The gather of the gradient of the layer above."""


def test_where_it_begins_is_one_place_for_all_ranks() -> None:
    """With sequence parallelism a reduction begins behind the gather of the gradient, which it would hold up; tokens and all
    other reductions where backward enters the half above."""
    attention, mlp = (3, "attention"), (3, "mlp")
    for layout, place in (("TP2", ("enter", (4, "attention"))), ("TP2+SP", ("after", GATHER))):
        timetable = timetable_of(begun(tiny_job("gpt", **LAYOUTS[layout])), 0)
        tasks = timetable.backward(0).tasks
        assert tasks.get(place) == (Task("begin", attention, "linear_proj"),)
        assert tasks["enter", mlp] == (Task("recompute", attention, since="linear_proj"), Task("recompute", mlp))
    tasks = timetable_of(begun(tiny_job("gpt", **LAYOUTS["TP2+SP"]), how="gather"), 0).backward(0).tasks
    assert tasks["after", GATHER] == (Task("begin", attention, "linear_qkv"),)
    assert tasks["core", (4, "attention")] == (Task("begin", attention, "linear_proj", "linear_qkv"),)
    assert tasks["enter", mlp] == (Task("recompute", attention, since="linear_proj"), Task("recompute", mlp))
    tasks = timetable_of(begun(job_of("EP2")), 0).backward(0).tasks
    assert tasks["enter", (4, "attention")] == (Task("recompute", attention), Task("begin", mlp, "dispatch"))
    assert tasks["enter", mlp] == (Task("recompute", mlp, since="dispatch"),)
