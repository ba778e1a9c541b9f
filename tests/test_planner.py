"""Plans for every layout: they are valid, say where each half is recomputed and why, and predict what follows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.anatomy import COLUMN_PARALLEL, HALVES, RECOMPUTABLE
from megatron_lynx.config import Experts
from megatron_lynx.config.job import Budget
from megatron_lynx.cost.recompute import recomputed_flops
from megatron_lynx.cost.stage_memory import parts_beside_layers
from megatron_lynx.errors import ConfigError, Infeasible
from megatron_lynx.kinds.planning import half_tensors
from megatron_lynx.plan.plan_file import dump_plan
from megatron_lynx.planner import decide, make_plan
from megatron_lynx.planner.writing import written
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.solver.answer import SolvedChunks
from megatron_lynx.solver.options import HalfOptions, StageProblems
from megatron_lynx.units import MIB
from tests.config.jobs import catalogued_job
from tests.cost.on_ranks import count
from tests.layouts import LAYOUTS
from tests.long import long, with_models
from tests.profiler.made_up import made_up_profile
from tests.solver.problems import solve
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
every_model = pytest.mark.parametrize("like", ["gpt", "llama"])


def with_budget(job, mib):
    return job.model_copy(update={"budget": Budget(activation_mib=mib)})


def planned(link_s=1.0, budget_mib=None, like="gpt", **layout):
    job = tiny_job(like, **layout)
    return make_plan(with_budget(job, budget_mib) if budget_mib else job, made_up_profile(job, link_s))


@every_layout
@every_model
def test_every_layout_has_a_plan_that_predicts_its_work(layout, like):
    job = tiny_job(like, **layout)
    plan = make_plan(job, made_up_profile(job))
    shape = LayerShape(job.model, job.parallel, job.batch.micro)
    for stage in plan.stages:
        recomputed = sum(len(rule.layers) * recomputed_flops(shape, rule.recompute) for rule in stage.rules)
        assert stage.predicted.recomputed_flops == recomputed
        assert stage.predicted.step_s > 0
        inputs = 2 * len(stage.layers) * shape.input_bytes
        assert stage.predicted.resident_activation_bytes >= inputs
    assert plan.provenance.job == job.digest
    assert plan.provenance.profile == made_up_profile(job).digest


@every_layout
@every_model
@pytest.mark.parametrize("recompute", ["all", "none", ("input_layernorm", "activation", "core_attention")])
@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("gather", ["keep", "once"])
def test_uniform_plans_are_valid(layout, like, recompute, windows, gather):
    job = tiny_job(like, **layout)
    plan = uniform_plan(job, recompute, windows=windows, gather=gather)
    wanted = {"all": set(RECOMPUTABLE), "none": set()}.get(recompute) if isinstance(recompute, str) else set(recompute)
    kept = set(COLUMN_PARALLEL) if job.parallel.sequence_parallel and gather == "keep" else set()
    for stage in plan.stages:
        assert {item for rule in stage.rules for item in rule.recompute} == wanted - kept
        assert stage.ahead_depth <= int(windows)


@with_models(["tp", "tp+sp"])
def test_training_under_a_plan_does_and_holds_what_the_plan_predicts(pool_of, layout, like):
    job = tiny_job(like, microbatches=1, seq=64, micro=1, **LAYOUTS[layout])
    profile = made_up_profile(job, link_s=1.0)
    nothing, plan = (make_plan(job.model_copy(update={"policy": policy}), profile) for policy in ("none", "planned"))
    kept, predicted = nothing.stages[0].predicted, plan.stages[0].predicted
    for stock, counted in pool_of(2).run(count, job, [None, plan]):
        assert counted.flops - stock.flops == predicted.recomputed_flops > 0
        assert counted.hidden == counted.frames > 0
        saved = kept.resident_activation_bytes - predicted.resident_activation_bytes
        states = saved - (stock.resident_bytes - counted.resident_bytes)
        noise = job.model.seq * 16  # results of reductions that gloo still holds when the forward returns
        assert -noise <= states <= 5 * counted.state_bytes * counted.frames + noise
        rest = (states + counted.state_bytes // 2) % counted.state_bytes - counted.state_bytes // 2
        assert abs(rest) <= noise, "what is left over are random states, which frames remember"


@every_layout
def test_layers_of_transformer_engine_are_planned_with_the_norms_inside_their_linears(layout):
    """From nothing recomputed to everything: its plan is valid, which demands a norm with every recomputed linear."""
    job = tiny_job("llama", implementation="transformer_engine", **layout)
    profile = made_up_profile(job)
    whole = job.layers_on(0) * sum(profile.half(half).saved_bytes for half in HALVES) * job.parallel.pipeline
    for share in (0.8, 0.95, 1.5):
        plan = make_plan(with_budget(job, share * whole / MIB), profile)
        assert plan.model.implementation == "transformer_engine"


def test_long_windows_hide_everything_but_the_last_half_is_kept():
    plan = planned(tensor=2)
    (stage,) = plan.stages
    first, last = stage.rules
    assert (str(first.layers), str(last.layers)) == ("1-3", "4")
    assert (first.windows.attention, first.windows.mlp) == ("bwd.mlp.0", "bwd.attention.0+1")
    assert last.windows.attention == "bwd.mlp.0"
    assert not last.recomputed_in("mlp")
    assert stage.ahead_depth == 1
    assert stage.predicted.exposed_recompute_s == 0
    assert stage.predicted.hidden_recompute_s > 0
    assert stage.predicted.ahead_bytes > 0


def test_sequence_parallelism_keeps_or_gathers_once_as_the_budget_allows():
    layout = {"tensor": 2, "sequence_parallel": True}
    gathering = planned(link_s=1e-5, **layout).stages[0]
    assert gathering.rules[0].gather.attention == "bwd.mlp.0"
    assert gathering.rules[0].gather.mlp == "bwd.attention.0+1"
    assert set(COLUMN_PARALLEL) <= set(gathering.rules[0].recompute)
    roomy = planned(link_s=1e-5, budget_mib=8, **layout).stages[0]
    assert all(rule.gather.of(half) is None for rule in roomy.rules for half in HALVES)
    assert roomy.predicted.resident_activation_bytes > gathering.predicted.resident_activation_bytes


def test_without_windows_a_wide_budget_keeps_everything():
    plan = planned(link_s=1e-9, budget_mib=64, tensor=2)
    assert all(rule.recompute == () for rule in plan.stages[0].rules)
    assert plan.stages[0].ahead_depth == 0


def test_a_budget_is_kept_and_bought_with_time():
    job = tiny_job(tensor=2, layers=8)
    profile = made_up_profile(job, link_s=1e-9)
    least = make_plan(job, profile).stages[0].predicted
    everything = uniform_kept_bytes(job)
    steps = []
    for share in (0.5, 0.7, 0.9):
        limited = with_budget(job, share * everything / MIB)
        predicted = make_plan(limited, profile).stages[0].predicted
        assert predicted.resident_activation_bytes <= share * everything
        assert predicted.resident_activation_bytes >= least.resident_activation_bytes
        steps.append(predicted.step_s)
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == len(steps)


def uniform_kept_bytes(job):
    kept = job.model_copy(update={"policy": "none"})
    return make_plan(kept, made_up_profile(job)).stages[0].predicted.resident_activation_bytes


def test_a_budget_below_the_least_is_refused_with_figures():
    with pytest.raises(Infeasible, match=r"budget.activation_mib, stage 0: found 1.0\d KiB, needed at least"):
        planned(budget_mib=0.001, tensor=2)


def test_policies_none_and_full():
    job = tiny_job(tensor=2)
    profile = made_up_profile(job)
    none, full = (make_plan(job.model_copy(update={"policy": policy}), profile).stages[0] for policy in ("none", "full"))
    assert all(rule.recompute == () for rule in none.rules)
    assert full.rules[0].windows.attention == "on_demand"
    assert full.predicted.hidden_recompute_s == 0
    assert full.predicted.step_s == pytest.approx(none.predicted.step_s + full.predicted.exposed_recompute_s)


def test_a_profile_of_another_job_is_refused_with_every_difference():
    profile = made_up_profile(tiny_job(tensor=2))
    with pytest.raises(ConfigError) as refusal:
        make_plan(tiny_job(tensor=1, hidden=64), profile)
    assert [problem.where for problem in refusal.value.problems] == ["profile: shape.hidden", "profile: shape.tensor"]


GIB_OF_65B = 45
"""With t = 2 and p = 8 on 64 GPUs: what no stage that recomputes less fits, and least memory does by far."""


def llama_65b(**changes):
    layout = {"tensor": 2, "pipeline": 8, "sequence_parallel": True, "distributed_optimizer": True} | changes.pop("parallel", {})
    job = catalogued_job(gpus=64, batch=128, policy=changes.pop("policy", "planned"), parallel=layout)
    return job.model_copy(update=changes)


TWO_CHUNKS = {"layers_per_chunk": 2}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["planned", "full"])
@pytest.mark.parametrize(
    ("chunks", "ratio"),
    [({}, 0.0), ({}, 0.3), ({}, "auto"), (TWO_CHUNKS, "auto"), *long((TWO_CHUNKS, 0.0), (TWO_CHUNKS, 0.3))],
    ids=str,
)
def test_nothing_is_over_the_devices_budget_in_the_simulator_either(policy, chunks, ratio):
    job = llama_65b(parallel=chunks, policy=policy, offload_ratio=ratio, budget=Budget(memory_gib=GIB_OF_65B))
    decision = decide(job, analytic_profile(job))
    for stage, memory in enumerate(decision.memory):
        assert 0.5 * job.memory_budget_bytes < memory.total <= job.memory_budget_bytes
        beside = parts_beside_layers(job, stage).at("backward").total
        assert decision.simulation.memory(stage).peak_bytes <= job.memory_budget_bytes - beside
    assert {stage.predicted.memory_bytes for stage in decision.plan.stages} == {memory.total for memory in decision.memory}


@st.composite
def jobs_on_gpus(draw):
    """Llama-65B on 64 GPUs, as anyone may lay it out, with less memory than it would like."""
    tensor, pipeline = draw(st.sampled_from([(1, 16), (2, 8), (4, 4), (8, 2), (4, 8)]))
    chunks = draw(st.sampled_from([{}, {"layers_per_chunk": 5}, {"partition": "auto"}]))
    job = llama_65b(
        parallel={"tensor": tensor, "pipeline": pipeline, "sequence_parallel": draw(st.booleans()) and tensor > 1} | chunks,
        policy=draw(st.sampled_from(["planned", "planned", "none", "full", "balanced", "selective"])),
        offload_ratio=draw(st.sampled_from([0.0, 0.5, "auto"])),
    )
    return job.model_copy(update={"budget": Budget(memory_gib=draw(st.floats(30, 80)))})


@settings(max_examples=3, deadline=None)
@given(jobs_on_gpus())
@pytest.mark.slow
def test_any_answer_fits_in_the_simulator_and_comes_again(job):
    profile = analytic_profile(job)
    try:
        decision = decide(job, profile)
    except Infeasible:
        return
    for stage, memory in enumerate(decision.memory):
        beside = parts_beside_layers(decision.job, stage).at("backward").total
        assert beside + decision.simulation.memory(stage).peak_bytes <= memory.total <= job.memory_budget_bytes
    assert dump_plan(make_plan(job, profile)) == dump_plan(decision.plan)


def test_on_gpus_the_fastest_plan_that_fits_is_wanted_and_on_the_testbed_the_least_memory():
    whole = llama_65b(budget=Budget(memory_gib=63))
    roomy = make_plan(whole, analytic_profile(whole))
    first, last = roomy.stages[0].predicted, roomy.stages[-1].predicted
    assert last.exposed_recompute_s == 0 < first.exposed_recompute_s
    assert first.memory_bytes > 0.99 * whole.memory_budget_bytes
    job = tiny_job(tensor=2)
    assert planned(tensor=2).stages[0].rules[0].recompute != ()
    wide = job.model_copy(update={"budget": Budget(memory_gib=8)})
    assert make_plan(wide, made_up_profile(job, 1e-9)).stages[0].rules[0].recompute == ()


@pytest.mark.slow
def test_offloading_is_chosen_where_it_is_faster_and_declined_where_the_run_fits():
    tight = {"budget": Budget(memory_gib=GIB_OF_65B)}
    recomputing = make_plan(llama_65b(**tight), analytic_profile(llama_65b()))
    offloading = make_plan(llama_65b(offload_ratio="auto", **tight), analytic_profile(llama_65b()))
    sizes = [0 if stage.offload is None else stage.offload.bytes for stage in offloading.stages]
    assert sizes[0] > 0
    assert {stage.offload.half_by_half for stage in offloading.stages[4:] if stage.offload} == {"all"}, "four or fewer in flight"
    assert offloading.stages[0].predicted.host_bytes >= 6 * sizes[0]
    assert offloading.stages[0].predicted.step_s < recomputing.stages[0].predicted.step_s
    declined = make_plan(
        llama_65b(offload_ratio="auto", policy="none", budget=Budget(memory_gib=100)), analytic_profile(llama_65b())
    )
    assert all(stage.offload is None for stage in declined.stages)


def test_a_stated_share_is_offloaded_and_copies_are_waited_for():
    job = llama_65b(offload_ratio=1.0, policy="none", budget=Budget(memory_gib=100))
    slow = job.cluster.pcie.model_copy(update={"gb_per_s": 25.0, "shared_with_nic": False})
    crawling = job.model_copy(update={"cluster": job.cluster.model_copy(update={"pcie": slow})})
    fast, late = (decide(each, analytic_profile(each)) for each in (job, crawling))
    assert [stage.asked.ratio for stage in fast.stages] == [1.0] * 4 + [0.0] * 4
    shape = LayerShape.of(job)
    small = sum(tensor.bytes for half in HALVES for tensor in half_tensors(shape, half) if tensor.bytes < MIB)
    sizes = [stage.offload.bytes for stage in fast.plan.stages[:2]]
    assert sizes[0] == fast.plan.stages[0].predicted.resident_activation_bytes - 10 * small
    assert sizes[1] == sizes[0] - shape.input_bytes, "what it received stays"
    assert {each.plan.stages[0].offload.beside_messages for each in (fast, late)} == {"avoid"}, "also where links are apart"
    assert late.simulation.exposed_copy_s(3) > 0
    assert late.simulation.step_s > fast.simulation.step_s
    assert late.plan.stages[3].predicted.exposed_copy_s == pytest.approx(late.simulation.exposed_copy_s(3))


def test_copies_that_lag_behind_need_memory():
    """Where exchanges overlap passes, and so do not wait for copies."""
    job = llama_65b(offload_ratio=1.0, policy="none", parallel={"layers_per_chunk": 5})
    slow = job.cluster.pcie.model_copy(update={"gb_per_s": 25.0, "shared_with_nic": False})
    crawling = job.model_copy(update={"cluster": job.cluster.model_copy(update={"pcie": slow})})
    with pytest.raises(Infeasible, match="copies that lag behind"):
        decide(crawling, analytic_profile(crawling))


def test_host_memory_bounds_what_is_offloaded():
    job = llama_65b(offload_ratio=1.0, policy="none")
    small = job.cluster.node.model_copy(update={"host_memory_gib": 64.0})
    short = job.model_copy(update={"cluster": job.cluster.model_copy(update={"node": small})})
    with pytest.raises(
        Infeasible, match=r"host memory of a node, stage 0: found .* of activations \(8 devices\), needed at most 64 GiB"
    ):
        make_plan(short, analytic_profile(short))


def test_stocks_policies_are_recomputed_as_stock_does():
    job = llama_65b(policy="balanced", budget=Budget(memory_gib=200))
    for stage in make_plan(job, analytic_profile(job)).stages:
        assert {rule.recompute for rule in stage.rules} == {("input_layernorm", "pre_mlp_layernorm", "activation")}
        assert stage.ahead_depth == 0
    job = job.model_copy(update={"policy": "selective"})
    for stage in make_plan(job, analytic_profile(job)).stages:
        assert all("core_attention" in rule.recompute and "linear_qkv" in rule.keep for rule in stage.rules)


@pytest.mark.slow
def test_a_large_vocabulary_moves_layers_off_the_last_stage():
    layout = {"tensor": 4, "pipeline": 4, "partition": "auto"}
    job = llama_65b(parallel=layout)
    wide = job.model_copy(update={"model": job.model.model_copy(update={"vocab": 32 * job.model.vocab})})
    even = wide.model_copy(update={"parallel": wide.parallel.model_copy(update={"partition": None})})
    best, stock = (make_plan(each, analytic_profile(each)) for each in (wide, even))
    counts = [len(stage.layers) for stage in best.stages]
    assert sum(counts) == 80
    assert counts[3] < 20 < max(counts)
    assert best.stages[0].predicted.step_s < stock.stages[0].predicted.step_s
    assert best.provenance.job == wide.digest


@pytest.mark.slow
def test_an_open_partition_of_chunks_is_a_sound_plan():
    job = llama_65b(parallel={"tensor": 4, "pipeline": 4, "layers_per_chunk": 5, "partition": "auto"})
    job = job.model_copy(update={"model": job.model.model_copy(update={"vocab": 32 * job.model.vocab})})
    plan = make_plan(job, analytic_profile(job))
    assert plan.parallel.chunks == 4
    assert len(plan.chunks_of(3)) == 4
    assert sum(len(stage.layers) for stage in plan.chunks_of(3)) < 20


def test_what_does_not_fit_says_what_binds_and_the_nearest_change_that_fits():
    job = llama_65b(parallel={"distributed_optimizer": False}, budget=Budget(memory_gib=60))
    with pytest.raises(Infeasible) as refusal:
        make_plan(job, analytic_profile(job))
    first, *_, nearest = map(str, refusal.value.problems)
    for part in (
        "memory of a device, stage 0",
        "optimizer 4",
        "everything recomputable recomputed",
        "at most 60.00 GiB",
        "missing",
    ):
        assert part in first
    assert "nearest change that fits: parallel.distributed_optimizer: true" in nearest
    changed = job.model_copy(update={"parallel": job.parallel.model_copy(update={"distributed_optimizer": True})})
    assert make_plan(changed, analytic_profile(changed))


def test_what_a_job_may_state_but_no_plan_can_do_is_refused():
    layout = {"tensor": 8, "context": 2, "sequence_parallel": True}
    job = catalogued_job("llama3-70b", "h800-80g", gpus=16, batch=16, parallel=layout, policy="selective")
    job = job.model_copy(update={"model": job.model.model_copy(update={"attention": "unfused"})})
    with pytest.raises(ConfigError) as refusal:
        make_plan(job, analytic_profile(job))
    for part in (
        "job: policy: found selective, needed planned, balanced, full or none with parallel.context 2",
        "job: model.attention: found unfused, needed flash with parallel.context 2",
        "job: model.implementation: found local, needed transformer_engine",
    ):
        assert part in str(refusal.value)


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a"])
def test_with_context_parallelism_everything_may_be_recomputed_but_the_core_attention(exchange):
    """What a ring or traded heads brought from other ranks stays; keys and values that were gathered are the rank's own again."""
    layout = {"tensor": 4, "context": 2, "pipeline": 4, "sequence_parallel": True, "context_exchange": exchange}
    job = catalogued_job("llama3-70b", "h800-80g", gpus=32, batch=16, seq=16384, parallel=layout, budget={"memory_gib": 200})
    job = job.model_copy(update={"model": job.model.model_copy(update={"implementation": "transformer_engine"})})
    kept, full = (make_plan(job.model_copy(update={"policy": policy}), analytic_profile(job)) for policy in ("none", "full"))
    assert full.parallel.context == 2
    rules = [rule for stage in full.stages for rule in stage.rules]
    saving_nothing = {"attention_bda", "mlp_bda"} | ({"linear_qkv", "rotary"} if exchange == "a2a" else set())
    assert {item for rule in rules for item in rule.recompute} == set(RECOMPUTABLE) - {"core_attention"} - saving_nothing
    before, after = (plan.stages[0].predicted.resident_activation_bytes for plan in (kept, full))
    rows, key, query, layers = 16384 // 2, 2 * 1024 // 4, 2 * 8192 // 4, 20
    exchanged = {"p2p": 2 * key, "all_gather": 0, "a2a": 2 * query + 2 * key}[exchange]
    inputs, result, log_sums = 2 * 2 * 8192 // 4, query, 4 * 64 // 4
    assert after / layers == pytest.approx(rows * (inputs + result + log_sums + exchanged), rel=0.01)
    assert after < before / 2
    planned = make_plan(job.model_copy(update={"policy": "planned", "budget": Budget(memory_gib=95)}), analytic_profile(job))
    assert not any("core_attention" in rule.recompute for stage in planned.stages for rule in stage.rules)


def test_a_uniform_plan_keeps_what_exchanges():
    plan = uniform_plan(tiny_job("llama", context=2), "all")
    assert all("core_attention" in rule.keep for stage in plan.stages for rule in stage.rules)
    with pytest.raises(ValueError, match=r"found core_attention recomputed, needed kept with parallel\.context 2"):
        uniform_plan(tiny_job("llama", context=2), ["core_attention"])


def test_layers_differ_where_that_shortens_the_step_and_are_alike_where_it_does_not() -> None:
    layout = {"tensor": 1, "pipeline": 8}
    tight = catalogued_job(
        "gpt-1.3b", "a100-80g-pcie", gpus=8, parallel=layout, batch=16, policy="planned", budget={"activation_mib": 1500}
    )
    profile = analytic_profile(tight)
    decided, problems = decide(tight, profile), StageProblems(tight, HalfOptions(tight, profile))
    leanest = [solve(replace(problems.of(stage), budget_bytes=None)) for stage in range(8)]  # with all layers alike
    alike = tuple(replace(answer, chunks=SolvedChunks([leanest[answer.stage]])) for answer in decided.stages)
    assert max(len(stage.rules) for stage in decided.plan.stages) > 2
    assert decided.simulation.step_s < 0.99 * rehearse(written(tight, alike), profile).step_s
    assert all(decided.simulation.memory(stage).peak_bytes <= 1500 * MIB for stage in range(8))
    roomy = tight.model_copy(update={"budget": Budget()})
    assert max(len(stage.rules) for stage in decide(roomy, profile).plan.stages) <= 2


def test_windows_of_a_uniform_plan_lie_outside_of_experts() -> None:
    """Which is checked as the plan is made."""
    experts = Experts(count=4, per_token=2, ffn=64, layers=("2-4", 6))
    job = tiny_job("llama", tensor=2, pipeline=2, layers=6, microbatches=4, sequence_parallel=True, experts=experts)
    for gather in ("keep", "once"):
        plan = uniform_plan(job, gather=gather)
        assert [str(span) for span in plan.model.moe_layers] == ["2-4", "6"]
        rules = {layer: stage.rule_for(layer) for stage in plan.stages for layer in stage.layers}
        inside = {layer for layer in rules if "experts_activation" in rules[layer].recomputed_in("mlp")}
        assert inside == {2, 3, 4, 6}
        assert rules[2].windows.of("mlp") == "bwd.attention.2+1"
        assert all(rules[layer].recomputed_in("attention") for layer in rules)
        assert any(rules[layer].windows.of("attention") != "on_demand" for layer in (2, 3))
