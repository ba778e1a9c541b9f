"""A forward and a backward side by side: worked examples, bounds of drawn layers, and what overlapped exchanges save a job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.config.job import Job
from megatron_lynx.cost.combined import MEASURED, UNDISTURBED, Beside, Nodes, nodes_of, paired_s
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.published.row import catalogued_job
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.stock import NONE, StockSetting, priced
from megatron_lynx.stock.layer import layer_seconds
from megatron_lynx.stock.legality import Facts, objections
from megatron_lynx.stock.rival import families, fastest, rivals
from megatron_lynx.stock.stage import StockStage

LAYER = Nodes(before_f=2, before_b=5, before_weights=2, experts_f=3, experts_b=6, experts_weights=2, exchange=4)
OVERLAPPED = StockSetting(overlap=True)


def test_one_pair_of_layers_is_walked_as_megatron_issues_it():
    """combine B 0-4 | before F 0-2, experts B 4-10 | dispatch F 4-8, dispatch B 10-14 | experts F 10-13 | combine F 14-18 |
    before B 14-19. With delayed weight gradients experts B ends at 8, its weights at 10, dispatch B at 12, and so on."""
    assert paired_s((LAYER,), (LAYER,)) == pytest.approx(19)
    assert paired_s((LAYER,), (LAYER,), delayed=True) == pytest.approx(18)
    assert paired_s((LAYER,), ()) == pytest.approx(2 + 4 + 3 + 4)
    assert paired_s((), (LAYER,)) == pytest.approx(4 + 6 + 4 + 5)


def test_what_runs_beside_each_other_slows_down():
    """before F takes 4 beside combine B, of which 2 of 4 are left then; experts B begins at 6, beside dispatch F until 14."""
    half = Beside(exchange=0.5, computing=0.5)
    layer = LAYER._replace(experts_f=0, before_b=0)
    assert paired_s((layer,), (layer,), half) == pytest.approx(4 + 2 + 8 + 2 + 4 + 4)
    assert paired_s((LAYER,), (LAYER,), UNDISTURBED) < paired_s((LAYER,), (LAYER,), MEASURED) < paired_s((LAYER,), (LAYER,), half)


seconds = st.integers(0, 9)


@st.composite
def drawn_layers(draw) -> Nodes:
    """Weights' gradients are a part of a backward."""
    before_f, before_b, before_weights, experts_f, experts_b, experts_weights, *rest = (draw(seconds) for _ in range(9))
    return Nodes(
        before_f, before_b + before_weights, before_weights, experts_f, experts_b + experts_weights, experts_weights, *rest
    )


some_layers = st.lists(drawn_layers(), max_size=4).map(tuple)


@given(some_layers, some_layers, st.booleans())
def test_no_pair_is_faster_than_its_streams_or_slower_than_one_after_the_other(forward, backward, delayed):
    took = paired_s(forward, backward, delayed=delayed)
    computing = sum(each.before_f + each.experts_f for each in forward) + sum(each.before_b + each.experts_b for each in backward)
    exchanges = 2 * sum(each.exchange for each in (*forward, *backward))
    behind = sum(each.back_f for each in forward) + sum(each.back_b for each in backward)
    assert max(computing + behind, exchanges + behind) <= took + 1e-6
    assert took <= paired_s(forward, ()) + paired_s((), backward) + behind + 1e-6


def test_the_combined_schedule_runs_one_forward_more_before_the_first_backward():
    assert " ".join(map(str, with_flushes(1, 3, more=1).orders[0])) == "0F0 1F0 0B0 2F0 1B0 2B0"
    for usual, more in zip(with_flushes(2, 4, 2).orders, with_flushes(2, 4, 2, more=1).orders, strict=True):
        first = [[action.kind for action in order].index("B") for order in (usual, more)]
        assert first[1] == first[0] + 1
        assert sorted(usual) == sorted(more)


def job_of(**changes) -> Job:
    """Qwen3 30B-A3B on two nodes of H100: experts over both of them."""
    layout = {"expert": 16, "expert_tensor": 1, "distributed_optimizer": True} | changes.pop("parallel", {})
    experts = {"count": 128, "per_token": 8, "ffn": 768, **changes.pop("experts", {})}
    model = {"implementation": "transformer_engine", "experts": experts, **changes.pop("model", {})}
    batch = {"micro": 1, "global": 256}
    return catalogued_job(
        "qwen3-30b-a3b", "h100-80g", gpus=16, batch=batch, parallel=layout, model=model, policy="none", **changes
    )


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep"])
def test_nodes_are_a_whole_layer(dispatcher):
    job = job_of(experts={"dispatcher": dispatcher, "shared_ffn": 512})
    shape, costs = LayerShape.of(job), analytic_profile(job)
    kind = job.model.sections(1)
    halves = layer_seconds(shape, costs, NONE, kind)
    nodes = nodes_of(costs, halves, kind)
    forward_s, backward_s = (sum(getattr(half, way) for half in halves) for way in ("forward_s", "backward_s"))
    waits_s = 2 * nodes.exchange
    assert nodes.before_f + nodes.experts_f + nodes.back_f + waits_s == pytest.approx(forward_s)
    assert nodes.before_b + nodes.experts_b + nodes.back_b + waits_s == pytest.approx(backward_s)
    assert 0 < nodes.experts_weights < nodes.experts_b
    assert 0 < nodes.before_weights < nodes.before_b


def test_overlapped_exchanges_take_less_time_and_a_layer_more_of_memory():
    job = job_of()
    costs = analytic_profile(job)
    none, overlapped = priced(job, costs, NONE), priced(job, costs, OVERLAPPED)
    assert 0.5 * none.step_s < overlapped.step_s < 0.9 * none.step_s
    backward = [price.stages[0].totals["backward"] for price in (none, overlapped)]
    layer = none.stages[0].activations / 48
    assert layer < backward[1] - backward[0] < 3 * layer
    both = StockSetting(recompute=("layernorm", "moe_act"), overlap=True)
    assert overlapped.step_s < priced(job, costs, both).step_s < none.step_s


def test_copies_that_are_longer_than_a_pair_are_waited_for():
    """Megatron offloads beside overlapped exchanges as well. A pair then lasts as long as the copies of one of its two passes:
    if they cost nothing, a plan loses to a rival that does not exist."""
    job, sent = job_of(), StockSetting(offload=("core_attn", "attn_proj", "moe_act"), overlap=True)
    costs = analytic_profile(job)
    slow = [link.model_copy(update={"seconds": 20 * link.seconds}) if link.kind == "host" else link for link in costs.links]
    slower = costs.model_copy(update={"links": tuple(slow)})
    near, far, kept = priced(job, costs, sent), priced(job, slower, sent), priced(job, slower, OVERLAPPED)
    stage = StockStage(job, sent, 0)
    copies_s = sum(slower.link_s("host", layer.bytes.copied) for layer in stage.chunks[0])
    assert near.step_s == pytest.approx(kept.step_s)
    assert far.step_s > (job.microbatches - 1) * copies_s


def test_they_are_among_the_rivals_where_megatron_takes_them():
    whole, pipeline = job_of(), job_of(parallel={"pipeline": 2, "expert": 8})
    chunks = job_of(parallel={"pipeline": 2, "expert": 8, "layers_per_chunk": 12})
    overlapped = [any(setting.overlap for family in families(job) for setting in family) for job in (whole, pipeline, chunks)]
    assert overlapped == [True, False, True]
    assert "several chunks" in next(objections(OVERLAPPED, Facts.of(pipeline), "config"))
    for job in (whole, chunks):
        costs = analytic_profile(job)
        price = priced(job, costs, StockSetting(overlap=True, delayed=True))
        best = fastest(rivals(job, costs, price.most_bytes))
        assert best.setting in (OVERLAPPED, price.setting)
        assert price.step_s <= best.step_s < 1.001 * price.step_s
        assert best.step_s < priced(job, costs, NONE).step_s
