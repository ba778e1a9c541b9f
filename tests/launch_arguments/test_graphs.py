"""Captured graphs of a launch: what a plan may be beside, what is made of both, and what they hold."""

from __future__ import annotations

import pytest

from megatron_lynx.advise.today import graph_bytes
from megatron_lynx.config.job import Job
from megatron_lynx.cost.host import NO_HOST_TIME, half_host_s
from megatron_lynx.cost.recompute import half_kept_bytes
from megatron_lynx.cost.stage_memory import mask_bytes, pool_bytes
from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.units import GIB
from tests.stock.parts import stage_parts
from tests.test_filling import deferring

from .test_reading import SMALL

MANY = "--pipeline-model-parallel-size 2 --global-batch-size 64 --sequence-parallel"
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn --te-rng-tracker"


def job_with(flags: str) -> Job:
    return job_of(read_launch(f"{SMALL} {MANY} {flags}".split(), gpus=8), "h100-80g")


@pytest.mark.parametrize(
    ("flags", "captured"),
    [
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn", ("attn",)),
        ("--external-cuda-graph --cuda-graph-scope mlp", ("mlp",)),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope moe_preprocess moe_router attn --num-experts 8", None),
        ("--cuda-graph-impl none --te-rng-tracker", ()),
    ],
)
def test_what_a_plan_may_be_beside(flags: str, captured: tuple[str, ...] | None) -> None:
    """In the order of plans, whatever the launch's is."""
    expected = ("attn", "moe_router", "moe_preprocess") if captured is None else captured
    reading = read_launch(f"{SMALL} {flags}".split(), gpus=8)
    assert tuple(next((fact.value for fact in reading.facts if fact.place == "model.captured"), ())) == expected
    assert reading.today.alone == ""


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--cuda-graph-impl local --cuda-graph-scope attn", "it captures layers whole, if only attn or mlp is named"),
        ("--cuda-graph-impl local --cuda-graph-modules attn moe_router --num-experts 8", "it captures layers whole"),
        ("--enable-cuda-graph", "it captures layers whole"),
        ("--cuda-graph-impl full_iteration", "forward and backward are one graph"),
        ("--cuda-graph-impl transformer_engine", "without modules whole layers are captured"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp", "attn and mlp: nothing is left"),
        (f"{GRAPHS} --mtp-num-layers 1", "--mtp-num-layers: beside it and graphs nothing was tried"),
    ],
)
def test_no_plan_is_beside_what_leaves_nothing(flags: str, why: str) -> None:
    reading = read_launch(f"{SMALL} {flags}".split(), gpus=8)
    assert why in reading.today.alone
    assert not any(fact.place == "model.captured" for fact in reading.facts)


def test_local_graphs_of_moe_layers_capture_nothing_of_a_gpt_model() -> None:
    """They stay in the launch, which is priced and planned as without them; in a hybrid stack they are graphs."""
    flags = "--cuda-graph-impl local --cuda-graph-modules moe_router moe_preprocess --num-experts 8"
    reading = read_launch(f"{SMALL} {flags}".split(), gpus=8)
    assert (reading.today.graphs, reading.today.alone, reading.today.flags) == (False, "", ())
    assert "--cuda-graph-impl" in reading.changed({}).arguments
    hybrid = read_launch(f"{SMALL} {flags} --hybrid-layer-pattern *-*E".split(), gpus=8)
    assert "it captures layers whole" in hybrid.today.alone


def test_today_holds_what_its_graphs_hold() -> None:
    """In backward, their pool is full anyway: masks, working memory and gradients come on top."""
    job, plain = job_with(GRAPHS), job_with("--te-rng-tracker")
    none = [each.model_copy(update={"policy": "none"}) for each in (job, plain)]
    beside, without = (stage_parts(each, 0).states.buffers for each in none)
    assert len(job.layers_of(0)) * mask_bytes(LayerShape.of(job)) < graph_bytes(job) <= beside - without
    assert graph_bytes(plain) == 0


def test_the_launch_under_a_plan_beside_graphs_keeps_them() -> None:
    reading = read_launch(f"{SMALL} {GRAPHS} --recompute-activations".split(), gpus=8)
    kept, dropped = reading.with_graphs_of(("attn",)), reading.with_graphs_of(())
    assert kept.today.flags == ("--recompute-activations",)
    assert {word for word in GRAPHS.split() if word.startswith("--")} <= {*kept.changed({}).arguments, *dropped.today.flags}
    assert not any("graph" in word or "rng" in word for word in dropped.changed({}).arguments)


def test_the_faster_of_a_plan_beside_graphs_and_one_without_is_taken() -> None:
    """Layers so small that the host is slower than the device; and the same where nobody knows the host's time, so that graphs
    gain nothing, in memory in which their pools leave too little."""
    job = job_with(f"{GRAPHS} --micro-batch-size 1")
    costs = analytic_profile(job)
    without = job.model_copy(update={"model": job.model.model_copy(update={"captured": ()})})
    beside = decide(job, costs)
    assert beside.plan.model.captured == ("attn",)
    assert beside.simulation.step_s < decide(without, costs).simulation.step_s
    unknown = costs.model_copy(update={"host_time": None})
    assert decide(deferring(job, "none"), unknown).plan.model.captured == ("attn",), "no slower than without"
    kept_bytes = max(each.total for each in decide(without, unknown).memory)
    less = job.model_copy(update={"budget": job.budget.model_copy(update={"memory_gib": 0.9 * kept_bytes / GIB})})
    assert decide(less, unknown).plan.model.captured == ()
    assert decide(less, unknown).plan.provenance.job == less.digest


def test_a_captured_half_costs_the_host_nothing() -> None:
    job = job_with(GRAPHS)
    attention, mlp = job.model.sections(1)
    costs = analytic_profile(job)
    assert half_host_s(costs, attention, ()) == NO_HOST_TIME != half_host_s(costs, mlp, ())


def test_what_graphs_hold() -> None:
    """Their pool is there in updates, too; masks and working memory always. Of a mask there is one for each layer and micro-batch
    in flight, and the one that a call makes."""
    job = job_with(GRAPHS)
    plain = job.model_copy(update={"policy": "none", "model": job.model.model_copy(update={"captured": ()})})
    captured = job.model_copy(update={"policy": "none"})
    shape, own, other = LayerShape.of(captured), stage_parts(captured, 0), stage_parts(plain, 0)
    layers = len(captured.layers_of(0))
    pool = layers * half_kept_bytes(shape, captured.model.sections(1)[0])
    assert pool_bytes(captured, shape, 0) == own.pool == pool
    assert (own.pools, other.pools) == (2 * pool, 0)
    assert own.at("update").activations - other.at("update").activations == own.pools
    assert own.at("backward").activations == other.at("backward").activations
    assert mask_bytes(shape) == job.batch.micro * job.model.seq**2
    more = own.states.buffers - other.states.buffers - (2 * layers + 1) * mask_bytes(shape) - shape.input_bytes
    assert 0 < more <= own.at("backward").in_hand
