"""Plans beside overlapped exchanges of experts: what they take and hold, against stock's overlapped and against usual plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_lynx.anatomy import HALVES
from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import load_job
from megatron_lynx.errors import ConfigError, Infeasible
from megatron_lynx.planner import Decision, decide
from megatron_lynx.planner.evaluation import most_held
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.simulator.passes import ChunkPasses, TimedPass, in_phases
from megatron_lynx.simulator.simulation import most_beside
from megatron_lynx.stock import NONE, StockSetting, priced
from megatron_lynx.timeline import Span
from megatron_lynx.units import GIB
from tests.stock.test_combined import job_of as stock_job

pytestmark = pytest.mark.slow

OVERLAPPED = StockSetting(overlap=True)


def job_of(gib: float, *, overlapped: bool = True, experts: dict[str, Any] | None = None, **changes: Any) -> Job:
    job = stock_job(experts={"overlapped": overlapped, **(experts or {})}, budget={"memory_gib": gib}, **changes)
    return job.model_copy(update={"policy": "planned"})


def decided(*args: Any, **kwargs: Any) -> Decision:
    job = job_of(*args, **kwargs)
    return decide(job, analytic_profile(job))


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2, "expert": 8, "layers_per_chunk": 12}], ids=["one stage", "chunks"])
def test_where_all_fits_it_is_stocks(layout: dict[str, Any]) -> None:
    found, stock = decided(70, parallel=layout), stock_job(parallel=layout)
    price = priced(stock, analytic_profile(stock), OVERLAPPED)
    assert found.simulation.step_s == pytest.approx(price.step_s, rel=2e-3)
    assert all(not rule.recompute for entry in found.plan.stages for rule in entry.rules)
    held, theirs = (max(each.total for each in stages) for stages in (found.memory, price.stages))
    assert abs(held - theirs) < 0.01 * theirs


def test_weight_gradients_that_megatron_delays_shorten_a_plan_as_they_do_stock() -> None:
    """A story: under a plan `--delay-wgrad-compute` stayed in the launch and had no price, so Qwen3 235B's plan seemed slower
    than what its launch takes today, whatever memory it had."""
    stock = stock_job()
    at_once_s, delayed_s = (
        priced(stock, analytic_profile(stock), StockSetting(overlap=True, delayed=delayed)).step_s for delayed in (False, True)
    )
    found = decided(70, experts={"delayed": True})
    assert delayed_s < 0.998 * at_once_s
    assert found.simulation.step_s == pytest.approx(delayed_s, rel=2e-3)
    assert found.plan.model.moe_delayed


def test_with_less_memory_it_recomputes_on_demand_and_stays_faster() -> None:
    """All-to-all over two nodes of H100, below what stock's overlap needs: faster than stock none, which needs more."""
    beside = decided(58)
    stock = stock_job()
    none = priced(stock, analytic_profile(stock), NONE)
    assert beside.simulation.total(0, "exposed_s") > 0.02 * beside.simulation.step_s
    assert 0.6 * none.step_s < beside.simulation.step_s < none.step_s
    assert max(each.total for each in beside.memory) <= 58 * GIB
    rules = [rule for entry in beside.plan.stages for rule in entry.rules]
    assert any("experts_activation" in rule.recompute for rule in rules)
    assert {rule.windows.of(half) for rule in rules for half in ("attention", "mlp")} == {ON_DEMAND}
    assert beside.plan.model.moe_overlapped
    assert not beside.plan.exchanging
    assert "--delay-wgrad-compute" in beside.weight_gradients


def test_what_does_not_fit_beside_them_may_fit_without() -> None:
    with pytest.raises(Infeasible, match=r"model.experts.overlapped: false"):
        decided(50.5)


def test_what_cannot_be_beside_them_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        decided(70, parallel={"pipeline": 2, "expert": 8})
    assert "expert 8, pipeline 2 with 1 chunk on each stage" in str(caught.value)


@pytest.mark.parametrize("gib", [53.8, 54])
def test_a_plan_that_the_loss_binds_fits(gib: float) -> None:
    """What is held before a backward is looked up in the passes whose bytes are counted, not in pairs of them."""
    assert max(each.total for each in decided(gib).memory) <= gib * GIB


def test_what_is_held_at_a_time_is_that_of_passes_one_after_the_other() -> None:
    simulation = decided(57).simulation
    assert simulation.apart is not None
    job = job_of(57)
    assert [*most_held(job, simulation, 0)] == [*most_held(job, simulation.apart, 0)]


def test_what_waits_long_goes_to_the_host() -> None:
    """A stage with chunks has micro-batches in flight whose backward is far away."""
    chunks = {"pipeline": 2, "expert": 8, "layers_per_chunk": 12}
    with pytest.raises(Infeasible):
        decided(47, parallel=chunks)
    found = decided(47, parallel=chunks, offload_ratio="auto")
    assert max(each.total for each in found.memory) <= 47 * GIB
    sent = [entry.offload for entry in found.plan.stages if entry.offload is not None]
    assert sent
    assert {each.beside_messages for each in sent} == {"allow"}


def test_on_one_stage_it_goes_half_by_half() -> None:
    """Beside the other micro-batch, in both directions: so the step stays that of the flag with everything kept, as stock's does,
    where recomputations make it longer; and less fits than with these."""
    kept, recomputed, sent = decided(70), decided(58), decided(58, offload_ratio="auto")
    assert kept.simulation.step_s <= sent.simulation.step_s < recomputed.simulation.step_s
    (stage,) = sent.plan.stages
    assert stage.offload is not None
    assert stage.offload.pace_bytes is not None
    assert sent.stages[0].host_sets == (2,)
    assert sent.simulation.exposed_copy_s(0) == 0
    assert max(each.total for each in sent.memory) <= 58 * GIB


def test_copies_that_are_longer_than_a_pair_are_waited_for() -> None:
    job = job_of(58, offload_ratio=1.0)
    profile = analytic_profile(job)
    slow = [link.model_copy(update={"seconds": 20 * link.seconds}) if link.kind == "host" else link for link in profile.links]
    near, far = (decide(job, each) for each in (profile, profile.model_copy(update={"links": tuple(slow)})))
    assert far.simulation.exposed_copy_s(0) > near.simulation.exposed_copy_s(0)
    assert far.simulation.step_s > near.simulation.step_s


def test_both_passes_of_a_pair_have_copies_on_their_way() -> None:
    """Four layers, the first of which holds 8 and the others 2 each: 23 in a pair, of which one pass alone holds 14."""
    held = [4, 4, 4 - 3, 4 - 3, 4 - 3, 4 - 3, 4 - 3, 4 - 3]
    spans = [tuple(Span(kind, at, at + 1.0, at // 2) for at in range(8)) for kind in ("forward", "backward")]
    forward = TimedPass(8.0, memory=tuple((at + 1.0, size) for at, size in enumerate(held)), spans=spans[0])
    backward = TimedPass(8.0, memory=tuple((at + 1.0, -size) for at, size in enumerate(reversed(held))), spans=spans[1])
    passes = ChunkPasses(in_phases({("F", "steady"): forward, ("B", "steady"): backward}))
    chunk = replace(passes, at_once=passes)
    assert most_beside([passes], 0) == 0, "nothing goes half by half"
    made, left = [8, 10, 12, 14], [14, 13, 11, 9]
    assert most_beside([chunk], 0) == max(map(sum, zip(made, left, strict=True))) - 14 == 9
    assert most_beside([chunk], 8) == 1


def test_nothing_hides_in_collectives_of_tensor_parallel_ranks() -> None:
    """Where inputs are gathered, as well."""
    cut = {"tensor": 2, "sequence_parallel": True, "expert_tensor": 1}
    found, least_gib = decided(47, parallel=cut), 46.5
    rules = [rule for entry in found.plan.stages for rule in entry.rules]
    assert any(rule.recompute for rule in rules)
    assert {rule.windows.of(half) for rule in rules for half in HALVES} <= {ON_DEMAND, None}
    assert {rule.gather.of(half) for rule in rules for half in HALVES} <= {ON_DEMAND, None}
    assert max(each.total for each in found.memory) <= 47 * GIB
    assert decided(least_gib, parallel=cut).simulation.step_s > found.simulation.step_s


def test_dense_layers_of_a_chunk_recompute_where_their_copies_would_lag() -> None:
    """A story: DeepSeek-V3's first chunk has dense layers alone, whose forward is too short for the share that other chunks copy,
    so that each forward of the warm-up held more, and no plan was found that fits."""
    experts = {"count": 256, "per_token": 8, "ffn": 2048, "shared_ffn": 2048, "layers": [*range(4, 65)]}
    changes = {
        "model": {
            "like": "models/deepseek-v3",
            "implementation": "transformer_engine",
            "layers": 64,
            "experts": experts | {"overlapped": True, "dispatcher": "deepep"},
        },
        "gpus": 256,
        "parallel": {
            "tensor": 1,
            "pipeline": 8,
            "partition": None,
            "expert": 32,
            "layers_per_chunk": 2,
            "distributed_optimizer": True,
        },
        "batch": {"micro": 1, "global": 1024},
        "offload_ratio": "auto",
        "budget": {"memory_gib": 72},
        "optimizer": {"offload": 1.0, "precision_aware": True},
    }
    job = load_job("deepseek-v3-h100-80g", changes)
    found = decide(job, analytic_profile(job))
    first = found.plan.stages[0]
    dense = next(rule for rule in first.rules if 1 in rule.layers)
    assert first.offload is not None
    assert dense.recompute or dense.checkpoint
