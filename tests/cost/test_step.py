"""Seconds of a step: each part by hand on profiles whose figures are round, and how policies compare."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.anatomy import HALVES
from megatron_lynx.config.parallel import Overlap
from megatron_lynx.cost.recompute import recomputed_items
from megatron_lynx.cost.stage import of_every_stage
from megatron_lynx.cost.step import waited_messages
from megatron_lynx.cost.update import update_s
from megatron_lynx.planner import decide
from megatron_lynx.planner.partitioning import step_s
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.roofline import fewest_in_a_node
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.simulator.simulate import simulate
from megatron_lynx.solver.stages import Stages
from megatron_lynx.stock import OF_POLICY, priced
from megatron_lynx.timeline import Passes
from tests.config.jobs import catalogued_job
from tests.profiler.made_up import made_up_profile
from tests.simulator.plain import plain_passes
from tests.tiny_jobs import tiny_job


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_a_policy_costs_what_it_recomputes(policy):
    job = tiny_job(tensor=2)
    profile = made_up_profile(job, link_s=0.25)
    stock, recomputing = (priced(job, profile, OF_POLICY[each]).microbatch_s(0) for each in ("none", policy))
    items = {name: item for half in HALVES for name, item in profile.half(half).items.items()}
    recomputed = sum(items[name].forward_s for name in recomputed_items(policy) if name in items)
    collectives = 2 * 0.25 if policy == "full" else 0.0
    assert recomputing.forward_s == stock.forward_s
    assert recomputing.backward_s - stock.backward_s == pytest.approx(job.model.layers * (recomputed + collectives))


def test_copies_cost_nothing_until_they_outlast_a_forward():
    job = catalogued_job(seq=8192, policy="balanced", budget={"memory_gib": 1e6})
    slow = job.cluster.model_copy(update={"pcie": job.cluster.pcie.model_copy(update={"gb_per_s": 1.0})})
    fast, crawling = (
        Stages(each, analytic_profile(each)).answer(0)
        for each in (
            job.model_copy(update={"offload_ratio": 0.2}),
            job.model_copy(update={"offload_ratio": 1.0, "cluster": slow}),
        )
    )
    assert fast.exposed_copies_s == 0
    least = crawling.offloaded_share * crawling.chunks.most_resident_bytes / 1e9 * job.microbatches * job.chunks
    assert crawling.exposed_copies_s > least / 2


def test_replicas_that_nodes_cut_badly_update_slowly():
    """6 replicas of 2 ranks: stages begin in the middle of nodes, and a ring has nodes with only two of its members."""
    layout = {"tensor": 2, "pipeline": 8, "layers_per_chunk": 2, "sequence_parallel": True, "distributed_optimizer": True}
    even, uneven, worst = (catalogued_job(gpus=16 * d, batch=8 * d, parallel=layout) for d in (8, 6, 3))
    seconds = [update_s(job, analytic_profile(job)) for job in (even, uneven, worst)]
    assert seconds == sorted(seconds)
    assert seconds[1] > 1.5 * seconds[0]


@settings(max_examples=300, deadline=None)
@given(first=st.integers(0, 63), stride=st.integers(1, 20), sharers=st.integers(2, 200), node_gpus=st.sampled_from([1, 4, 6, 8]))
def test_the_fewest_members_of_a_ring_in_a_node_are_as_counted(first, stride, sharers, node_gpus):
    counted = Counter((first + stride * member) // node_gpus for member in range(sharers))
    assert fewest_in_a_node(first, stride, sharers, node_gpus) == min(counted.values())


def test_stages_are_alike_with_as_many_layers_and_the_same_end():
    parallel = {"tensor": 2, "pipeline": 6, "partition": [13, 14, 13, 13, 13, 14], "sequence_parallel": True}
    job = catalogued_job(gpus=12, batch=12, parallel=parallel)
    asked = []
    assert of_every_stage(job, lambda stage: asked.append(stage) or stage) == [0, 1, 2, 2, 2, 5]
    assert asked == [0, 1, 2, 5]


@pytest.mark.parametrize("slower", [1.0, 1.1])
@pytest.mark.parametrize("pipeline", [2, 3, 8])
def test_blocking_messages_are_paid_for_by_every_micro_batch(pipeline, slower):
    """As they are simulated, to one message in a step."""
    stages = [Passes(1.0, 2.0)] * (pipeline - 1) + [Passes(slower, 2 * slower)]
    passes = [[plain_passes(stage.forward_s, stage.backward_s)] for stage in stages]
    simulated = simulate(with_flushes(pipeline, 32), passes, p2p_s=0.1).step_s
    paces = [stage.both_s + 0.1 * ((at > 0) + (at < pipeline - 1)) for at, stage in enumerate(stages)]
    assert step_s([1] * pipeline, 32, lambda at, _: paces[at]) == pytest.approx(simulated, abs=0.1001)


@pytest.mark.parametrize(("chunks", "group"), [(2, 4), (4, 4), (5, 4), (2, 8)])
def test_messages_behind_passes_cost_what_they_cost_in_the_simulator(chunks, group):
    """The first micro-batch waits for each on its way through all chunks and back; larger groups leave time for the way round."""
    passes = [[plain_passes(1.0, 2.0)] * chunks] * 4
    schedule = with_flushes(4, 16, chunks, group)
    simulated_s = simulate(schedule, passes, 0.125).step_s - simulate(schedule, passes).step_s
    layout = {"pipeline": 4, "layers_per_chunk": 20 // chunks, "microbatch_group": group}
    job = catalogued_job(gpus=4, batch=16, parallel=layout, policy="none")
    assert 2 * waited_messages(job) == pytest.approx(simulated_s / 0.125)


def test_messages_between_passes_hold_up_every_pass_of_a_chunk():
    layout = {"pipeline": 8, "layers_per_chunk": 5}
    job = catalogued_job(gpus=8, batch=16, parallel=layout, policy="none", overlap={"messages": False})
    assert waited_messages(job) == 16 * 2 + 7


@pytest.mark.parametrize("chunks", [2, 5])
def test_messages_between_passes_cost_what_they_cost_in_the_simulator(chunks):
    """But for one: nothing follows the last pass."""
    passes = [[plain_passes(1.0, 2.0)] * chunks] * 4
    between_s, never_s = (
        simulate(with_flushes(4, 16, chunks), passes, each, between_passes=True).step_s for each in (0.125, 0.0)
    )
    layout = {"pipeline": 4, "layers_per_chunk": 20 // chunks}
    job = catalogued_job(gpus=4, batch=16, parallel=layout, policy="none", overlap={"messages": False})
    assert (between_s - never_s) / 0.125 == pytest.approx(2 * waited_messages(job) - 1)


def test_a_plan_knows_messages_between_passes():
    """Plans were priced as if messages ran behind passes, whatever the launch said."""
    layout = {"tensor": 2, "pipeline": 4, "layers_per_chunk": 4, "sequence_parallel": True}
    job = catalogued_job("llama-7b", gpus=8, batch=8, parallel=layout, policy="planned")
    between = job.model_copy(update={"overlap": Overlap(messages=False)})
    steps_s = [decide(each, analytic_profile(each)).simulation.step_s for each in (job, between)]
    message_s = analytic_profile(job).link_s("p2p", LayerShape.of(job).input_bytes)
    assert steps_s[1] - steps_s[0] > 2 * 8 * 2 * message_s / 2
    assert analytic_profile(between).digest != analytic_profile(job).digest
