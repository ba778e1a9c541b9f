"""Layers with a mixture of experts: both halves are recorded and recomputed; routers decide once, and tokens travel once.

Megatron's own layers, routers and dispatchers, local ones with an MLP for each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron_lynx.anatomy import DENSE
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.testbed.ranks import RankPool
from tests.long import long
from tests.plan.strategies import plans_for, samples
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import checkpointed
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_every_bit import checked
from tests.transparency.trials import Outcome, Trial

Pools = Callable[[int], RankPool]

EXPERTS = {"count": 4, "per_token": 2, "ffn": 32}
SPREAD = {"replicas": 2, "expert": 2}
TP2 = {"tensor": 2, "sequence_parallel": True}
PP2 = {"pipeline": 2, "microbatches": 4}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "EP2, every second layer": (SPREAD, {"layers": 2}),
    "EP2": (SPREAD, {"layers": "all"}),
    "PP2, EP2": ({**PP2, **SPREAD}, {"layers": "all"}),
    "TP2+SP, experts cut": (TP2, {"shared_ffn": 32}),
    "TP2+SP, EP2, every second layer": ({**TP2, "expert": 2, "expert_tensor": 1}, {"layers": 2, "shared_ffn": 32}),
    "PP2, the first layer dense": (PP2, {"layers": ("2-4",)}),
    "PP2xVPP2": ({**PP2, "layers_per_chunk": 1}, {"layers": (1, 4)}),
    "PP2xVPP2, EP2": ({**PP2, **SPREAD, "layers_per_chunk": 1}, {"layers": "all"}),
}
"""A layout, and the layers with experts."""
EXCHANGING = ("EP2", "PP2, EP2", "PP2xVPP2, EP2")
"""Those of tests in which exchanges of tokens are windows."""

STATEFUL = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.01, 0.02, 0.03],
    "moe_z_loss_coeff": 0.001,
    "moe_input_jitter_eps": 0.1,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "routers that count, draw and are corrected": ("PP2xVPP2", STATEFUL),
    "tokens dropped": ("one rank", {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}),
    "dispatched by gathers": ("TP2+SP, EP2, every second layer", {"moe_token_dispatcher_type": "allgather"}),
    "shared experts beside the dispatch": ("TP2+SP, EP2, every second layer", {"moe_shared_expert_overlap": True}),
}
"""A layout, and fields of TransformerConfig."""


def job_of(layout: str, **model: Any) -> Job:
    fields, experts = LAYOUTS[layout]
    return tiny_job("gpt", **fields, experts={**EXPERTS, **experts}, bias=False, **model)


def trial_of(**fields: Any) -> Trial:
    return Trial(training={"ddp": True, "optimizer": "megatron"}, traced=True, counted=True, **fields)


def checked_too(pool_of: Pools, job: Job, candidates: list[Plan], trial: Trial) -> None:
    """Nothing that stock would not have communicated, nothing left, and every half's backward seen, those of experts as well."""
    for rank, outcomes in enumerate(checked(pool_of, job, candidates, trial)):
        stage = rank // (job.parallel.tensor * job.replicas)
        for outcome in outcomes:
            assert sorted(outcome.planned.collectives) == sorted(outcome.stock.collectives)
            check_backwards(job, stage, outcome)


def check_backwards(job: Job, stage: int, outcome: Outcome) -> None:
    """Half by half from the last layer of the chunk up; no window lies in experts."""
    backwards: dict[int, list[tuple[int, str]]] = {}
    for event in outcome.planned.events:
        place = f"{event['window']}"
        assert not any(f".mlp.{n}@{layer}" in place for n in range(3) for layer in job.model.expert_layers), place
        if event["kind"] == "backward":
            backwards.setdefault(event["micro_batch"], []).append((event["layer"], event["half"]))
    layers = [layer for chunk in reversed(range(job.chunks)) for layer in reversed(job.layers_of(stage, chunk))]
    expected = [(layer, half) for layer in layers for half in ("mlp", "attention")]
    assert list(backwards.values()) == [expected] * job.microbatches


CONTAINED = ("one rank", "EP2, every second layer", "PP2, the first layer dense")
"""Layouts without tensor parallelism or chunks, of which others are made that have these too."""


@pytest.mark.parametrize("layout", [*(each for each in LAYOUTS if each not in (*EXCHANGING, *CONTAINED)), *long(*CONTAINED)])
def test_every_bit(pool_of: Pools, layout: str) -> None:
    job = job_of(layout)
    everything = recomputable(job)
    candidates = [plan_for(job, lambda layer: everything, windows=False)]
    if job.parallel.sequence_parallel:
        candidates.append(plan_for(job, lambda layer: recomputable(job, gather=True)))
    else:
        candidates += [plan_for(job, lambda layer: ()), plan_for(job, lambda layer: everything)]
    checked_too(pool_of, job, candidates, trial_of())


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(pool_of: Pools, variant: str) -> None:
    layout, fields = VARIANTS[variant]
    job = job_of(layout)
    items = recomputable(job, gather=job.parallel.sequence_parallel)
    if "moe_shared_expert_overlap" in fields:  # what runs inside the dispatcher is kept
        items = tuple(item for item in items if item in DENSE["attention"].names)
    checked_too(pool_of, job, [plan_for(job, lambda layer: items)], trial_of(model=fields, steps=3 if fields is STATEFUL else 1))


@pytest.mark.parametrize("layout", ["EP2", *long("TP2+SP, EP2, every second layer")])
def test_gathered_tokens(pool_of: Pools, layout: str) -> None:
    """What runs again on demand, in other halves' windows, and a layer that is a checkpoint, whose tokens are gathered again."""
    job = job_of(layout)
    gathered = job.model.experts.model_copy(update={"dispatcher": "allgather"})
    job = job.model_copy(update={"model": job.model.model_copy(update={"experts": gathered})})
    items = recomputable(job, gather=job.parallel.sequence_parallel)
    plans = [plan_for(job, lambda layer: items), checkpointed(plan_for(job, lambda layer: ()), "layer")]
    for outcomes in checked(pool_of, job, plans, trial_of(model=STATEFUL, steps=2)):
        again, whole = outcomes
        assert sorted(again.planned.collectives) == sorted(again.stock.collectives)
        assert len(whole.planned.collectives) > len(whole.stock.collectives), "as stock's checkpoints"


def test_exchanges_are_windows(pool_of: Pools) -> None:
    """Tokens travel while experts' own recomputations run, those of the attention half below them, and of the layer below. In
    backward the first exchange brings back the gradient of what experts returned; dropout masks are needed before it."""
    job = job_of("EP2", layers=2)
    own = plan_for(job, lambda layer: [item for item in recomputable(job) if item != "mlp_bda"], windows=False)
    candidates = [
        exchanging(own, {"mlp": "bwd.mlp.0", "attention": "bwd.mlp.2"}),
        exchanging(own, {"mlp": "bwd.mlp.0", "attention": "bwd.mlp.1"}),
    ]
    for outcomes in checked(pool_of, job, candidates, trial_of(model=STATEFUL)):
        for outcome in outcomes:
            assert outcome.planned.collectives == outcome.stock.collectives, "in kind and order"
            assert outcome.planned.counts[-1].on_demand == 0
            assert window_names(outcome) == {f"bwd.mlp.{n}@{layer}" for layer in (1, 2) for n in range(3)} | {
                f"fwd.mlp.{n}@{layer}" for layer in (1, 2) for n in range(3)
            }


def test_shared_experts_gather_once_beside_exchanges_that_are_windows(pool_of: Pools) -> None:
    """Such a plan could not be read: its exchanges were looked up among the collectives of a dense MLP."""
    job = job_of("TP2+SP, EP2, every second layer")
    raw = plan_for(job, lambda layer: recomputable(job, gather=True), windows=False).model_dump(mode="json")
    raw["parallel"]["expert"] = 2
    plan = Plan.model_validate(raw)
    waits = [wait for half in timetable_of(plan, 0).backward(0).halves for wait in half.waits]
    assert not any(wait.over for wait in waits if wait.window.layer in job.model.expert_layers and wait.window.half == "mlp")
    for [outcome] in checked(pool_of, job, [plan], trial_of()):
        assert outcome.planned.counts[-1].gathered == 2 * job.model.layers * job.microbatches


def exchanging(plan: Plan, windows: dict[str, Any], layers: Sequence[int] = (1, 2)) -> Plan:
    """The same plan for ranks whose tokens travel by all-to-all, with these windows in some layers."""
    raw = plan.model_dump(mode="json")
    raw["parallel"]["expert"] = 2
    for stage in raw["stages"]:
        stage["ahead_depth"] = 2
        for rule in stage["rules"]:
            rule["windows"] = windows if rule["layers"] in layers else rule["windows"]
    return Plan.model_validate(raw)


def window_names(outcome: Outcome) -> set[str]:
    return {event["window"] for event in outcome.planned.events if event["kind"] == "window"}


def test_a_rank_without_tokens(pool_of: Pools) -> None:
    """All tokens go to the experts of the first rank. What the second one's save is empty, and its recomputations find
    nothing."""
    job = job_of("EP2, every second layer")
    candidates = [plan_for(job, lambda layer: ()), plan_for(job, lambda layer: recomputable(job))]
    ranks = checked(pool_of, job, candidates, trial_of(steps=2, model=STATEFUL, starved=True))
    for rank, load in enumerate((2.0, 0.0)):
        assert [outcome.planned.counts[-1].expert_load for outcome in ranks[rank]] == [load, load]
        assert ranks[rank][1].planned.counts[-1].let_go_bytes > 0


def test_offloaded_with_recomputation(pool_of: Pools) -> None:
    """What experts save stays, or goes where the plan says so: other sizes in every step, nothing of experts without tokens."""
    job = job_of("PP2, the first layer dense")
    keeping, recomputing = plan_for(job, lambda layer: ()), plan_for(job, lambda layer: recomputable(job))
    candidates = [
        offloading(keeping, 1 << 20),
        offloading(keeping, 1 << 20, experts=True),
        offloading(recomputing, 4_000, experts=True),
    ]
    for trial in (Trial(tampered=True), Trial(steps=2, tampered=True, model=STATEFUL, starved=True)):
        for rank, outcomes in enumerate(checked(pool_of, job, candidates, trial)):
            counts = [outcome.planned.counts[-1] for outcome in outcomes]
            assert all(each.offloaded_bytes == each.reloaded_bytes for each in counts)
            assert all((each.offloaded_bytes > 0) == (rank == 0) for each in counts)
            assert rank > 0 or counts[0].offloaded_bytes < counts[1].offloaded_bytes


@pytest.mark.parametrize("layout", ["TP2+SP, EP2, every second layer", *long("PP2xVPP2", "PP2, EP2", "PP2xVPP2, EP2")])
def test_random_plans(pool_of: Pools, layout: str) -> None:
    job = job_of(layout)
    checked(pool_of, job, samples(plans_for(job), 3), Trial(steps=1, backward_thread=True, canaries=True))
