"""What does not fit is refused before training, every problem with its place, and leaves nothing behind (rules R6, R14)."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lynx.anatomy import DENSE
from megatron_lynx.anatomy import EXPERTS as MIXTURE
from megatron_lynx.apply.refusals import refused_settings
from megatron_lynx.apply.releases import KNOWN
from megatron_lynx.errors import HookRefused, OffloadError, PlanMismatch
from megatron_lynx.limits import limits
from megatron_lynx.plan.plan import Head
from tests.deferring import deferring
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..transparency.offloaded import offloading
from ..transparency.plans import plan_for, recomputable
from ..transparency.test_experts import exchanging
from ..transparency.test_overlapped import job_of as overlapped_job
from . import on_ranks

FEATURES = {
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
    "moe_layer_recompute": True,
    "heterogeneous_block_specs": True,
    "num_microbatches_with_partial_activation_checkpoints": 1,
    "distribute_saved_activations": True,
    "hybrid_context_parallel": True,
    "use_ring_exchange_p2p": True,
    "inference_fuse_tp_communication": True,
    "experimental_attention_variant": "gdn2",
    "cuda_graph_impl": "local",
    "fp8": "e4m3",
}


def plan_of(job):
    return plan_for(job, lambda _: recomputable(job))


def refused(pool_of, job, spoil, plan=None):
    """What every rank of the job answers, when its plan is installed into a run that `spoil` made unfit."""
    refusals = pool_of(job.gpus).run(on_ranks.refused, job, plan or plan_of(job), spoil)
    for refusal in refusals:
        assert refusal.error is not None, "installed"
        assert refusal.changed == []
        assert all(problem.finding and problem.where in str(refusal.error) for problem in refusal.error.problems)
    return refusals


def test_features_that_work_against_a_plan(pool_of):
    """All at once: every one is listed."""
    [refusal] = refused(pool_of, tiny_job(), partial(on_ranks.set_config, **FEATURES))
    assert (type(refusal.error), refusal.error.exit_status) == (HookRefused, 1)
    assert sorted(refusal.places) == sorted(f"config.{name}" for name in FEATURES)
    assert all(problem.todo.startswith("drop ") for problem in refusal.error.problems)


EXPERTS = {"count": 4, "per_token": 2, "ffn": 32, "layers": ("2-3",)}


@pytest.mark.parametrize(("planned", "live", "where"), [(None, EXPERTS, "this run"), (EXPERTS, None, "the plan")])
def test_experts_where_the_plan_has_none_or_the_other_way_round(pool_of, planned, live, where):
    [refusal] = refused(pool_of, tiny_job(experts=live), None, plan_of(tiny_job(experts=planned)))
    assert (type(refusal.error), refusal.error.exit_status) == (PlanMismatch, 2)
    assert refusal.places == ["plan: model.moe_layers: layers 2, 3"]
    assert refusal.error.problems[0].finding == f"experts in {where} alone"


def test_experts_of_another_make(pool_of):
    """Dispatched by something that needs a GPU; in a layer of another class; their router reads differently."""
    job = tiny_job(experts=EXPERTS)
    [refusal] = refused(pool_of, job, on_ranks.other_experts)
    assert refusal.places == ["config.moe_flex_dispatcher_backend", "layer 1", "layer 3"]
    [refusal] = refused(pool_of, job, on_ranks.rewrite_router)
    assert refusal.places == ["megatron.core.transformer.moe.router:TopKRouter.forward"]


def test_experts_that_cannot_be_looked_into(pool_of):
    """Where a plan recomputes nothing of them, and sends nothing of them to the host, they may be of any make."""
    job = tiny_job(experts=EXPERTS)
    kept = plan_for(job, lambda _: DENSE["attention"].recomputable)
    for plan in (plan_of(job), offloading(kept, 1000, experts=True)):
        [refusal] = refused(pool_of, job, on_ranks.experts_of_my_own, plan)
        places = [
            "config.moe_shared_expert_overlap",
            "layer 2.mlp.experts",
            "layer 2.mlp.token_dispatcher",
            "layer 2.experts_fc2",
        ]
        assert refusal.places == places
        assert all("keep the experts' items in the plan" in problem.todo for problem in refusal.error.problems)
    for plan in (kept, offloading(kept, 1000)):
        assert pool_of(1).run(on_ranks.refused, job, plan, on_ranks.experts_of_my_own)[0].error is None


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_stock_recomputation(pool_of, granularity):
    [refusal] = refused(pool_of, tiny_job(), partial(on_ranks.set_config, recompute_granularity=granularity))
    assert refusal.places == ["config.recompute_granularity"]
    assert "the plan decides" in str(refusal.error)


@pytest.mark.parametrize(
    ("spoil", "places"),
    [
        (on_ranks.wrap_in_fsdp, ["model wrapper"]),
        (on_ranks.random_numbers_of_another_class, ["random-number tracker"]),
        (on_ranks.a_tracker_of_its_own, ["layer 1.core_attention"]),
        (on_ranks.other_classes, ["layer 1", "layer 2.linear_fc1"]),
        (on_ranks.twice, ["model"]),
        (on_ranks.without_decoder, ["model"]),
        (
            on_ranks.rewrite_function,
            ["megatron.core.transformer.mlp:MLP.forward", "megatron.core.pipeline_parallel.p2p_communication:_batched_p2p_ops"],
        ),
    ],
    ids=lambda value: getattr(getattr(value, "func", value), "__name__", ""),
)
def test_a_run_that_hooks_cannot_hold(pool_of, spoil, places):
    [refusal] = refused(pool_of, tiny_job(), spoil)
    assert (type(refusal.error), refusal.error.exit_status) == (HookRefused, 1)
    assert refusal.places == places


HEAD = Head(pieces=2)


@pytest.mark.parametrize(
    ("what", "job", "changes"),
    [("head", tiny_job(), {"head": HEAD}), ("experts", tiny_job(experts=EXPERTS), {}), ("overlapped", overlapped_job("EP2"), {})],
    ids=["head", "experts", "overlapped"],
)
def test_code_that_matters_only_in_some_runs_is_looked_at_in_those(pool_of, what, job, changes):
    """What a hook of one feature relies on: a release that rewrites it is refused where it is used, and nowhere else."""
    spoil, plan = partial(on_ranks.reads_otherwise, what=what), plan_for(job, lambda layer: ()).model_copy(update=changes)
    for refusal in refused(pool_of, job, spoil, plan):
        assert (type(refusal.error), refusal.places) == (HookRefused, [what])
        assert "not read as recorded" in str(refusal.error)
    plain = plan_of(tiny_job())
    assert [answer.error for answer in pool_of(1).run(on_ranks.refused, tiny_job(), plain, spoil)] == [None]


def test_groups_that_are_not_megatrons_own(pool_of):
    """Decentralised ones: hooks would wait for collectives that never come. It ended in an assertion of Megatron's."""
    for refusal in refused(pool_of, tiny_job(tensor=2), on_ranks.groups_of_its_own):
        assert refusal.places == ["model.pg_collection.tp"]
    [refusal] = refused(pool_of, tiny_job(), on_ranks.without_groups)
    assert refusal.places == ["megatron.core.parallel_state"]


def test_halves_that_nobody_knows_need_a_plan_that_keeps_them(pool_of):
    """Layers of Megatron's class with a fork's own attention, or a fork's own MLP."""
    [refusal] = refused(pool_of, tiny_job(), on_ranks.other_halves)
    assert isinstance(refusal.error, PlanMismatch)
    assert refusal.places == [f"plan: model.opaque_layers: layers {number}" for number in (1, 2)]
    own = [{"kind": "own_attention", "layers": [1]}, {"kind": "own_mlp", "layers": [2]}]
    with pytest.raises(AssertionError, match="installed"):
        refused(pool_of, tiny_job(), on_ranks.other_halves, uniform_plan(tiny_job(opaque=own)))


def test_a_host_without_memory(pool_of):
    """Both numbers, and nothing is installed."""
    job = tiny_job()
    plan = offloading(plan_for(job, lambda _: ()), 1000, pace=500)
    [refusal] = refused(pool_of, job, on_ranks.without_host_memory, plan)
    assert type(refusal.error) is OffloadError
    assert refusal.places == ["stage 0: host memory for offloaded activations"]
    assert "0 B free of the machine" in str(refusal.error)


@pytest.mark.parametrize(("machines", "ranks_of_one"), [("aa", 2), ("ab", 1)], ids=["one node", "two nodes"])
def test_ranks_that_srun_had_started_each_took_all_of_their_hosts_memory(pool_of, machines, ranks_of_one):
    """Nothing tells a rank how many are beside it, but the ranks themselves. The testbed sets no `LOCAL_WORLD_SIZE` either."""
    job = tiny_job(pipeline=2, microbatches=4)
    plan = offloading(plan_for(job, lambda _: ()), 1000, pace=500)
    for most_bytes, state_bytes in pool_of(2).run(on_ranks.shares_of_hosts, job, plan, machines):
        assert most_bytes == 10**9 * 9 // 10 // ranks_of_one
        assert state_bytes < 10**8, "less than a tenth of the host"


TWO_RANKS = tiny_job(tensor=2)
RECORDS, KEEPS = "TORCH_NCCL_AVOID_RECORD_STREAMS", {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}


def test_windows_held_their_operands_under_a_torch_before_2_8(pool_of):
    """NCCL's `record_stream` kept what an asynchronous collective reads and writes until the host saw it over: gigabytes more
    than the plan said, at 70B. gloo's ranks are not concerned, nor a plan without windows, nor whoever sets the variable."""
    windows = plan_of(TWO_RANKS)
    for refusal in refused(pool_of, TWO_RANKS, partial(on_ranks.older_torch_on_gpus, version="2.7.1+cu126"), windows):
        assert (type(refusal.error), refusal.places) == (HookRefused, [RECORDS])
        assert "found not set, with torch 2.7.1, needed 1" in str(refusal.error)
        assert f"export {RECORDS}=1" in str(refusal.error)


@pytest.mark.parametrize(
    ("plan", "spoil"),
    [
        (plan_of(TWO_RANKS), None),
        (plan_of(TWO_RANKS), partial(on_ranks.older_torch_on_gpus, version="2.8.0+cu128")),
        (plan_of(TWO_RANKS), partial(on_ranks.older_torch_on_gpus, version="2.6.0", **KEEPS)),
        (plan_for(TWO_RANKS, lambda _: ()), partial(on_ranks.older_torch_on_gpus, version="2.6.0")),
    ],
    ids=["gloo", "a later torch", "the variable is set", "no windows"],
)
def test_windows_are_carried_where_nothing_holds_their_operands(pool_of, plan, spoil):
    assert [refusal.error for refusal in pool_of(2).run(on_ranks.refused, TWO_RANKS, plan, spoil)] == [None, None]


def test_an_unknown_release(pool_of):
    """It is said what moved since the nearest one that is known."""
    [refusal] = refused(pool_of, tiny_job(), partial(on_ranks.rename_release, version="0.99.1"))
    assert (type(refusal.error), refusal.error.exit_status) == (HookRefused, 1)
    first, *moved = refusal.places
    assert first == "megatron.core"
    assert "megatron.core.pipeline_parallel.schedules:backward_step" in moved
    assert "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops" not in moved, "it reads the same in all of them"
    assert f"what moved since {[*KNOWN][-1]}" in str(refusal.error)


def test_a_plan_for_another_number_of_context_ranks(pool_of):
    for refusal in refused(pool_of, tiny_job(replicas=2), on_ranks.context_parallel):
        assert (type(refusal.error), refusal.error.exit_status) == (PlanMismatch, 2)
        assert refusal.places == ["plan: parallel.context"]


def test_a_plan_for_another_model(pool_of):
    other = tiny_job("llama", layers=6, hidden=64, ffn=128, heads=8, kv_groups=8)
    [refusal] = refused(pool_of, tiny_job(), None, plan_of(other))
    assert (type(refusal.error), refusal.error.exit_status) == (PlanMismatch, 2)
    assert refusal.places == [
        *(f"plan: model.{name}" for name in ("layers", "hidden", "ffn", "heads", "kv_groups")),
        "plan: stages.0.layers",
    ]


def test_a_plan_for_another_layout(pool_of):
    other = tiny_job(tensor=2, sequence_parallel=True)
    refusals = refused(pool_of, tiny_job(pipeline=2), None, plan_of(other))
    assert [refusal.places for refusal in refusals] == [
        [*(f"plan: parallel.{name}" for name in ("tensor", "pipeline", "sequence_parallel")), "plan: stages.0.layers"],
        [*(f"plan: parallel.{name}" for name in ("tensor", "pipeline", "sequence_parallel")), "plan: stages"],
    ]


def test_a_plan_with_other_stages(pool_of):
    """Same model, same layout, but a stage more to the first."""
    job = tiny_job(pipeline=2)
    plan = plan_of(job).model_dump(mode="json")
    first, second = plan["stages"]
    first["layers"], second["layers"] = "1-3", 4
    first["rules"].append(second["rules"].pop(0))
    first["ahead_depth"] = second["ahead_depth"] = 0
    for stage in (first, second):
        for rule in stage["rules"]:
            rule["windows"] = {}
    refusals = refused(pool_of, job, None, type(plan_of(job)).model_validate(plan))
    assert [refusal.places for refusal in refusals] == [["plan: stages.0.layers"], ["plan: stages.1.layers"]]
    assert {type(refusal.error) for refusal in refusals} == {PlanMismatch}


PLAIN = tiny_job(pipeline=2, microbatches=4)
INTERLEAVED = tiny_job(pipeline=2, layers_per_chunk=1, microbatches=4)


@pytest.mark.parametrize(("job", "other"), [(PLAIN, INTERLEAVED), (INTERLEAVED, PLAIN)], ids=lambda job: f"{job.chunks} chunks")
def test_a_plan_for_another_number_of_chunks(pool_of, job, other):
    for refusal in refused(pool_of, job, None, plan_of(other)):
        assert (type(refusal.error), refusal.places) == (PlanMismatch, ["plan: parallel.chunks"])
        assert f"found {other.chunks}, needed {job.chunks}" in str(refusal.error)


def test_a_plan_with_other_chunks(pool_of):
    """Same model, same layout, the layers cut elsewhere."""
    job, other = (tiny_job(pipeline=2, layers=6, partition=cut, microbatches=4) for cut in ((2, 1, 1, 2), (1, 2, 2, 1)))
    places = [[f"plan: stages.{at}.layers" for at in (stage, stage + 2)] for stage in range(2)]
    assert [refusal.places for refusal in refused(pool_of, job, None, plan_of(other))] == places


def test_a_plan_for_other_groups(pool_of):
    """Another order of passes: other windows, other memory."""
    spoil = partial(on_ranks.set_config, microbatch_group_size_per_vp_stage=4)
    for refusal in pool_of(2).run(on_ranks.refused, INTERLEAVED, uniform_plan(INTERLEAVED, "none"), spoil):
        assert (type(refusal.error), refusal.places) == (PlanMismatch, ["plan: parallel.microbatch_group"])
        assert "found 2, needed 4" in str(refusal.error)


def test_groups_in_which_gradients_come_early(pool_of):
    """Only the last stage can tell; it says both numbers."""
    job = tiny_job(pipeline=2, layers_per_chunk=1, microbatches=4, microbatch_group=4)
    first, last = pool_of(2).run(on_ranks.refused, job, plan_of(job))
    assert first.error is None
    assert (type(last.error), last.changed, last.places) == (HookRefused, [], ["plan: stages.1.windows"])
    assert "in groups of 4 micro-batches" in str(last.error)
    assert "groups of 2" in str(last.error)
    when_needed = partial(on_ranks.set_config, overlap_p2p_comm_warmup_flush=True)
    answers = pool_of(2).run(on_ranks.refused, job, plan_of(job), when_needed)
    assert [answer.error for answer in answers] == [None, None], "each is waited for right before its backward"


def test_copies_that_avoid_messages_that_are_always_under_way(pool_of):
    """Interleaved schedules overlap their exchanges with passes, unless they are told not to."""
    job = INTERLEAVED
    plan = offloading(plan_for(job, lambda _: ()), 1000, beside="avoid")
    for stage, refusal in enumerate(refused(pool_of, job, None, plan)):
        assert type(refusal.error) is HookRefused
        assert refusal.places == [f"plan: stages.{at}.offload.beside_messages" for at in (stage, stage + 2)]
        assert "--no-overlap-p2p-communication" in str(refusal.error)


OWN_DEVICES = {"cpu_offloading", "fine_grained_activation_offloading"}
"""What switches stock's offloading of activations on, in every release."""


def test_weight_gradients_that_cannot_be_deferred(pool_of):
    """Every reason at once: not added up where they lie, another decider, no main gradients."""
    job = tiny_job(tensor=2)
    plan = deferring(plan_of(job), most_bytes=1000)
    refusals = refused(pool_of, job, partial(on_ranks.set_config, defer_embedding_wgrad_compute=True), plan)
    for refusal in refusals:
        assert (type(refusal.error), refusal.error.exit_status) == (HookRefused, 1)
        assert [str(problem).partition(",")[0] for problem in refusal.error.problems] == [
            "config.gradient_accumulation_fusion: found False",
            "config.defer_embedding_wgrad_compute: found True",
            "layer 1.linear_qkv.weight: found no main_grad",
        ]
        assert all(problem.todo for problem in refusal.error.problems)


def test_weight_gradients_of_experts_that_cannot_be_deferred(pool_of):
    """Experts that nobody has looked into."""
    job = tiny_job(experts=EXPERTS, bias=False, replicas=2, expert=2)
    plan = exchanging(plan_for(job, lambda layer: (), windows=False), {})
    plan = deferring(plan, linears=MIXTURE.linears, chosen=lambda wait: "fwd" in wait, most_bytes=1000)
    for refusal in refused(pool_of, job, on_ranks.experts_of_my_own, plan):
        assert "config.moe_shared_expert_overlap" in refusal.places
        assert "needed off where a plan recomputes, offloads or defers inside experts" in str(refusal.error)


def test_experts_whose_weights_are_gathered_by_collectives_of_their_own():
    """Those of other layers were refused, and theirs were not."""
    config = SimpleNamespace(num_moe_experts=8, fp8=None, moe_token_dispatcher_type="alltoall", expert_gtp_weight_remat_size=2)
    [problem] = refused_settings(config, te=True)
    assert (problem.where, problem.finding) == ("config.expert_gtp_weight_remat_size", "2")
    config.expert_gtp_weight_remat_size = 1
    assert list(refused_settings(config, te=True)) == []


def test_every_way_in_which_stock_offloads_activations_is_known():
    """A release with another switch would let two deciders move the same tensors. Refused are the switches; the rest says how."""
    import megatron.core

    roots = {Path(megatron.core.__path__[0]), *(Path("build").glob("megatron-core-*/megatron/core"))}
    for root in roots:
        text = "".join((root / name).read_text() for name in ("model_parallel_config.py", "transformer/transformer_config.py"))
        switches = set(re.findall(r"^    (\w*offload\w*): bool = False", text, flags=re.MULTILINE))
        assert switches - HOW_IT_IS_DONE <= OWN_DEVICES & {limit.setting for limit, _ in limits(["plan"], ["model"])}, root


HOW_IT_IS_DONE = {"cpu_offloading_double_buffering", "cpu_offloading_retain_pinned_cpu_buffers", "cpu_offloading_weights"}
HOW_IT_IS_DONE |= {"delay_offload_until_cuda_graph"}


# --- while a plan is in force --------------------------------------------------------------------------------------------


def test_a_second_installation(pool_of):
    job = tiny_job()
    [refusal] = pool_of(1).run(on_ranks.second_installation, job, plan_of(job))
    assert (type(refusal.error), refusal.changed) == (HookRefused, [])
    assert {"layer 1._forward_mlp", "layer 4.linear_qkv.forward"} < {*refusal.places}
    assert "remove the first installation" in str(refusal.error)


def test_a_replacement_on_top_of_ours(pool_of):
    job = tiny_job()
    [refusal] = pool_of(1).run(on_ranks.replaced_on_top, job, plan_of(job))
    assert (type(refusal.error), refusal.changed) == (HookRefused, [])
    assert refusal.places == ["megatron.core.pipeline_parallel.schedules.backward_step"]


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2, "microbatches": 3}], ids=str)
def test_removal_in_the_middle_of_a_step(pool_of, layout):
    job = tiny_job(**layout)
    for refusals in pool_of(job.gpus).run(on_ranks.removal_mid_step, job, plan_of(job)):
        assert len(refusals) >= 3 * job.microbatches
        for refusal in refusals:
            assert (type(refusal.error), refusal.changed) == (HookRefused, [])
            assert "between steps" in str(refusal.error)
