"""Transformer Engine's layers under plans: its own Python of each release, its compiled extension stood in for. Not run on a GPU.

`make test` puts releases under build/ and names their folders in TRANSFORMER_ENGINE_2_NN_DIR.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megatron_lynx.anatomy import DENSE
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.profiler.made_up import saved_parts
from tests.tiny_jobs import tiny_job

from ..long import long
from ..plan.strategies import plans_for, samples
from ..profiler.on_ranks import bytes_saved_by_items
from ..te_releases import pool_with, pools_with
from ..transparency import test_benefit as benefit
from ..transparency.checkpoints import ahead, checkpointed, with_rest_in_wait
from ..transparency.offloaded import offloading
from ..transparency.plans import plan_for, recomputable
from ..transparency.test_every_bit import checked
from ..transparency.test_experts import STATEFUL
from ..transparency.timeline import timelines
from ..transparency.trials import Trial, compare_with_stock
from . import on_ranks, te_on_ranks

BUILT_WITH = "2.9"
"""What Megatron 0.16 is built with."""
OTHERS = [("2.14", "0.17"), ("2.20", "0.18"), ("2.17", "0.19")]
"""Other releases of Transformer Engine, each beside another release of megatron-core."""
NORMS = ("input_layernorm", "pre_mlp_layernorm")
FUSED = Trial(steps=2, training={"ddp": True, "overlap_grad_reduce": True}, model={"gradient_accumulation_fusion": True})

LAYOUTS = {
    "one rank": {},
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2, "microbatches": 4},
}


def te_job(like: str = "gpt", **fields) -> Job:
    return tiny_job(like, implementation="transformer_engine", **fields)


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    yield from pools_with(BUILT_WITH)


@pytest.mark.parametrize("layout", [*(layout for layout in LAYOUTS if layout != "TP2"), *long("TP2")])
def test_kept_recomputed_and_mixed(pool_of, layout):
    """Dropout is on. A norm alone is regenerated without its linear; with sequence parallelism its output is gathered once."""
    job = te_job(**LAYOUTS[layout])
    everything = recomputable(job, gather=True)
    candidates = [
        plan_for(job, lambda layer: ()),
        plan_for(job, lambda layer: NORMS, windows=False),
        plan_for(job, lambda layer: everything, windows=False),
        plan_for(job, lambda layer: everything),
        plan_for(job, lambda layer: [item for item in everything if (item in DENSE["attention"].names) == bool(layer % 2)]),
        plan_for(job, lambda layer: [*NORMS, "core_attention", "activation"]),
    ]
    checked(pool_of, job, candidates, Trial(steps=2 if layout == "one rank" else 1))


@pytest.mark.parametrize("layout", ["TP2+SP", *long("one rank", "TP2")])
def test_random_plans(pool_of, layout):
    job = te_job("llama", **LAYOUTS[layout])
    checked(pool_of, job, samples(plans_for(job, whole=True), 4), Trial(steps=1))


def test_weight_gradients_are_fused_and_reduced_in_backward(pool_of):
    """The weight reaches backward as itself: its flag would land on a copy else, and Megatron's DDP assert (rule R11)."""
    job = te_job("llama", tensor=2, sequence_parallel=True, dtype="bf16")
    checked(pool_of, job, [plan_for(job, lambda layer: recomputable(job, gather=True))], FUSED)


@pytest.mark.parametrize("grouped", [False, True], ids=["one by one", "grouped"])
def test_experts(pool_of, grouped):
    """Each with linears of its own, or one grouped GEMM for all of a rank; shared experts' input is gathered once."""
    experts = {"count": 4, "per_token": 2, "ffn": 32, "shared_ffn": 32, "layers": ("2-4",)}
    job = te_job(tensor=2, sequence_parallel=True, expert=2, expert_tensor=1, experts=experts, bias=False)
    candidates = [plan_for(job, lambda layer: NORMS, windows=False), plan_for(job, lambda layer: recomputable(job, gather=True))]
    training = {"ddp": True, "optimizer": "megatron"}
    checked(pool_of, job, candidates, Trial(training=training, model={"moe_grouped_gemm": grouped}))


def test_bytes_of_grouped_experts(pool_of):
    """Item by item, with Megatron's fused activation; of the router but for a few numbers of the auxiliary loss."""
    job = te_job("llama", seq=64, hidden=64, expert=2, replicas=2, experts={"count": 8, "per_token": 3, "ffn": 96}, dtype="bf16")
    counting = partial(bytes_saved_by_items, moe_grouped_gemm=True, bias_activation_fusion=True)
    ranks = pool_of(2).run(counting, job)
    saved = {item: sum(each.get(item, 0) for each in ranks) for item in ("input", *job.model.experts.section.names)}
    parts = {item: job.gpus * size for item, size in saved_parts(LayerShape.of(job)).items()}
    assert 0 <= saved.pop("router") - parts.pop("router") <= job.gpus * (2 * 8 + 1) * FP32_BYTES
    assert saved == parts


@pytest.mark.parametrize("grouped", [True, *long(False)])
def test_offloaded_experts(pool_of, grouped):
    """What they save goes to the host, beside recomputations and without; other tokens in every step, at last none for two of
    four. Copies are late by random times, and what nobody may read any more is overwritten."""
    job = te_job(layers=2, experts={"count": 4, "per_token": 2, "ffn": 32}, bias=False, **LAYOUTS["PP2"])
    kept, recomputed = plan_for(job, lambda layer: ()), plan_for(job, lambda layer: ("experts_fc1", "experts_activation"))
    candidates = [offloading(kept, 1 << 20), *(offloading(plan, 1 << 20, experts=True) for plan in (kept, recomputed))]
    for starved in (False, True):
        trial = Trial(steps=2, tampered=True, model=STATEFUL | {"moe_grouped_gemm": grouped}, starved=starved)
        first, _ = checked(pool_of, job, candidates, trial)
        without, whole, rest = (outcome.planned.counts[-1].offloaded_bytes for outcome in first)
        assert 0 < without < rest < whole


def test_sharded_by_its_own_adam(pool_of):
    """Megatron takes Transformer Engine's FusedAdam. Gradients are reduced in backward, weights gathered in forward."""
    job = te_job("llama", replicas=2, distributed_optimizer=True, dtype="bf16")
    overlapped = {**FUSED.training, "overlap_param_gather": True, "optimizer": "megatron"}
    trial = replace(FUSED, steps=3, training=overlapped, compared="weights")
    checked(pool_of, job, [plan_for(job, lambda layer: recomputable(job))], trial)
    assert pool_of(2).run(te_on_ranks.adam) == ["transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"] * 2


def test_two_chunks_on_each_stage(pool_of):
    """All recomputed, in every micro-batch and in every other one; some, and some of the rest on the host."""
    job = te_job(layers_per_chunk=1, **LAYOUTS["PP2"])
    everything, mixed = recomputable(job), lambda layer: [*NORMS, "core_attention"] if layer % 2 else ()
    candidates = [
        plan_for(job, lambda layer: everything),
        plan_for(job, lambda layer: everything, whole={"of_every": 2, "first": 1}),
    ]
    checked(pool_of, job, candidates)
    [first, _] = checked(pool_of, job, [offloading(plan_for(job, mixed), 20_000)], Trial(steps=1))
    assert first[0].planned.counts[-1].offloaded_bytes > 0


@pytest.mark.long
def test_two_chunks_that_gather(pool_of):
    """Tensor and sequence parallel as well, and chunks that are not all alike."""
    job = te_job(layers=6, partition=(1, 2, 2, 1), pipeline=2, microbatches=4, **LAYOUTS["TP2+SP"])
    mixed = plan_for(job, lambda layer: [*NORMS, "core_attention"] if layer % 2 else ())
    checked(pool_of, job, [plan_for(job, lambda layer: recomputable(job, gather=True))])
    for rank in checked(pool_of, job, [offloading(mixed, 20_000)], Trial(steps=1)):
        assert rank[0].planned.counts[-1].offloaded_bytes > 0


def test_nothing_that_was_let_go_is_read(pool_of):
    """What a norm saved is overwritten with NaN before backward (rule R10)."""
    job = te_job(tensor=2)
    for candidate in (recomputable(job), NORMS):
        plan = plan_for(job, lambda layer, items=candidate: items)
        for [outcome] in pool_of(2).run(compare_with_stock, job, [plan], Trial(canaries=True)):
            assert outcome.differing == []
            assert outcome.planned.overwritten > 0


def test_query_and_key_norms(pool_of):
    """They are code behind `linear_qkv`, in nodes of Transformer Engine's operation fuser: recomputed with `rotary`, and let
    go."""
    job = te_job("llama", tensor=2)
    plans = [plan_for(job, lambda layer: recomputable(job)), plan_for(job, lambda layer: ["rotary"])]
    for outcomes in pool_of(2).run(compare_with_stock, job, plans, Trial(canaries=True, model={"qk_layernorm": True})):
        for outcome in outcomes:
            assert outcome.differing == []
            assert outcome.planned.overwritten > 0
            assert outcome.planned.frames_left == 0


def test_what_its_nodes_keep_may_go_to_the_host(pool_of):
    """It empties what it has used: a reloaded tensor must not be another's, too. On the last stage it goes half by half."""
    job = te_job(**LAYOUTS["PP2"])
    mixed = plan_for(job, lambda layer: [*NORMS, "core_attention"] if layer % 2 else ())
    [first, last] = checked(pool_of, job, [offloading(mixed, 20_000, pace=5_000)], Trial(steps=1))
    assert first[0].planned.counts[-1].offloaded_bytes > 0
    assert last[0].planned.counts[-1].offloaded_bytes > 0


def test_what_only_column_parallel_linears_read_hides_behind_the_own_gradient(pool_of):
    """The row-parallel linear reads what it saved before it gathers the gradient; the others read theirs after that wait."""
    job = te_job("llama", tensor=2, sequence_parallel=True)
    raw = plan_for(job, lambda layer: [*NORMS, "linear_qkv", "rotary"], windows=False).model_dump(mode="json")
    raw["stages"][0]["ahead_depth"] = 1
    for rule in raw["stages"][0]["rules"]:
        rule["windows"] = {"mlp": "bwd.mlp.0"}
    for outcome in checked(pool_of, job, [Plan.model_validate(raw)]):
        assert outcome[0].planned.counts[0].in_windows == job.model.layers * job.microbatches


@pytest.mark.parametrize("like", ["llama", *long("gpt")])
def test_a_gradient_is_gathered_beside_a_checkpoint(pool_of, like):
    """Its linear reads what it saved before it asks for the gradient: that was begun where backward entered the half."""
    job = te_job(like, hidden_dropout=0.0, **LAYOUTS["TP2+SP"])
    late = checkpointed(plan_for(job, lambda layer: ()), "layer")
    halves = with_rest_in_wait(checkpointed(late, "halves"), ("attention", "mlp"))
    for outcomes in checked(
        pool_of, job, [late, with_rest_in_wait(late), with_rest_in_wait(ahead(late, how="gather")), halves], Trial(counted=True)
    ):
        first, *others = (Counter(outcome.planned.collectives) for outcome in outcomes)
        assert others[0] == others[1] == first


def test_grouped_experts_go_on_while_gradients_travel(pool_of):
    """One GEMM for all of a rank, in the wait for the gradients of what it returned."""
    job = te_job(expert=2, replicas=2, experts={"count": 4, "per_token": 2, "ffn": 32}, bias=False, hidden_dropout=0.0)
    plan = ahead(checkpointed(plan_for(job, lambda layer: ()), "layer"), expert=2)
    trial = Trial(training={"ddp": True, "optimizer": "megatron"}, model={"moe_grouped_gemm": True})
    checked(pool_of, job, [with_rest_in_wait(plan)], trial)


@pytest.mark.parametrize("layout", ["TP2", "TP2+SP"])
def test_tasks_run_beside_its_collectives(pool_of, layout):
    """Each of them is issued before, and waited for behind, what the plan puts into its window."""
    job = te_job("llama", layers=2, **LAYOUTS[layout])
    waits = benefit.collectives(*((2, 3) if job.parallel.sequence_parallel else (1, 1)))
    recomputing = plan_for(job, lambda layer: recomputable(job, gather=True))
    found = benefit.checked(pool_of, job, [recomputing, *benefit.weight_gradients(benefit.kept(job), waits)])
    assert benefit.windows_of(found, "weight gradient") == {*waits}
    assert benefit.windows_of(found, "recompute") == {waits[-1], waits[-1].replace("mlp", "attention")}


def fp8_job():
    """With one scale for all ranks' parts FP8 reduces amaxes, a few bytes, before each gather."""
    return te_job("llama", layers=2, dtype="bf16", fp8={"recipe": "tensorwise"}, **LAYOUTS["TP2+SP"])


def test_windows_in_fp8_are_those_of_other_layers(pool_of):
    """Though amaxes are reduced between them."""
    job = fp8_job()
    waits = [wait for wait in benefit.collectives(2, 3) if wait not in WAITED_FOR_AT_ONCE]
    found = benefit.checked(pool_of, job, benefit.weight_gradients(benefit.kept(job), waits))
    assert any(event.name == "allreduce" for timeline in found for event in timeline.events)
    assert benefit.works_in(found) == {wait: benefit.OF_SEQUENCE_PARALLELISM[wait] for wait in waits}


WAITED_FOR_AT_ONCE = ("bwd.attention.0", "bwd.mlp.0")


def test_in_fp8_a_hopper_waits_for_a_gradient_where_its_gather_is_issued(pool_of):
    """Transformer Engine does, to transpose its bytes: GEMMs of a Hopper read them by rows. What a plan puts there is right, and
    hides nothing. (Where that is no longer so, `WAITED_FOR_AT_ONCE` is empty.)"""
    job = fp8_job()
    plans = benefit.weight_gradients(benefit.kept(job), WAITED_FOR_AT_ONCE)
    for found in pool_of(2).run(timelines, job, plans, {"ddp": True}, benefit.FUSED):
        assert benefit.windows_of(found, "weight gradient") == {*WAITED_FOR_AT_ONCE}
        assert not any(timeline.window_of(task) for timeline in found for task in timeline.tasks)


def test_a_norm_alone_runs_no_gemm(pool_of):
    job = te_job(attention_dropout=0.0, hidden_dropout=0.0)
    [[outcome]] = pool_of(1).run(compare_with_stock, job, [plan_for(job, lambda layer: NORMS)], Trial(counted=True))
    assert outcome.planned.flops == outcome.stock.flops


def test_what_fused_attention_takes_from_the_generator_is_taken_again(pool_of):
    """A seed and an offset, which it saves though nothing drops out. A recomputation of it finds the same, and leaves no
    trace."""
    job = te_job("llama", attention_dropout=0.0, hidden_dropout=0.0)
    plan = plan_for(job, lambda layer: ["core_attention"] if layer == 1 else NORMS)
    [(taken, ends)] = pool_of(1).run(te_on_ranks.drawn_without_dropout, job, plan)
    stock, ours = taken
    in_forward = job.model.layers * job.microbatches
    assert len(stock) == in_forward
    assert len(ours) == in_forward + job.microbatches
    assert sorted(ours) == sorted([*stock, *stock[:: job.model.layers]])
    assert all(ends)


def test_the_same_collectives_as_stock(pool_of):
    """Nothing is gathered or reduced twice, and a norm's output once less often: not again for the weight gradient."""
    job = te_job(tensor=2, sequence_parallel=True)
    both = [plan_for(job, lambda layer: recomputable(job)), plan_for(job, lambda layer: recomputable(job, gather=True))]
    for kept, gathered in pool_of(2).run(compare_with_stock, job, both, Trial(counted=True)):
        assert sorted(kept.planned.collectives) == sorted(kept.stock.collectives)
        assert sorted(gathered.planned.collectives) == sorted(gathered.stock.collectives)


@pytest.mark.parametrize(("te", "core"), [*long(*OTHERS[:-1]), OTHERS[-1]])
def test_other_releases_are_held_and_equal_stock(te, core):
    job = te_job("llama", tensor=2, sequence_parallel=True, dtype="bf16")
    candidates = [
        plan_for(job, lambda layer: recomputable(job, gather=True)),
        plan_for(job, lambda layer: [*NORMS, "core_attention"]),
    ]
    with pool_with(te, 2, core) as pool:
        check_held(pool)
        checked(lambda ranks: pool, job, candidates, FUSED)
        for recipe in ("delayed", "tensorwise"):
            in_fp8 = te_job("llama", tensor=2, dtype="bf16", fp8={"recipe": recipe})
            everything = recomputable(in_fp8)
            checked(lambda ranks: pool, in_fp8, [plan_for(in_fp8, lambda layer, items=everything: items)])


def test_every_name_is_found_held_and_given_back(pool_of):
    check_held(pool_of(2))


def check_held(pool: RankPool) -> None:
    job = te_job(tensor=2, sequence_parallel=True)
    for seen in pool.run(te_on_ranks.held, job, plan_for(job, lambda layer: recomputable(job, gather=True))):
        assert seen.stale == []
        assert {name for name in seen.claimed if name.startswith("transformer_engine.")} == {
            f"transformer_engine.pytorch.module.{module}_along_first_dim"
            for module in (
                "base.gather",
                "linear.gather",
                "layernorm_linear.gather",
                "linear.reduce_scatter",
                "layernorm_linear.reduce_scatter",
            )
        }
        assert not any("layernorm" in name for name in seen.claimed if name.startswith("layer ")), "identities are no sites"
        assert seen.changed == []


def test_a_release_that_is_not_known_is_refused():
    job = te_job()
    with pool_with("2.4", 1) as pool:
        [refusal] = pool.run(on_ranks.refused, job, plan_for(job, lambda layer: NORMS))
    assert refusal.places[0] == "transformer_engine"
    assert any(place.endswith("LayerNormLinear.forward") for place in refusal.places), "what moved is said"


@pytest.mark.parametrize(
    ("spoil", "place"),
    [
        (partial(on_ranks.set_config, symmetric_ar_type="two_shot"), "config.symmetric_ar_type"),
        (te_on_ranks.another_tracker, "layer 1.core_attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(pool_of, spoil, place):
    job = te_job()
    [refusal] = pool_of(1).run(on_ranks.refused, job, plan_for(job, lambda layer: NORMS), spoil)
    assert refusal.places == [place]
    assert refusal.changed == []


def test_a_plan_for_local_layers_is_refused(pool_of):
    local = plan_for(tiny_job("gpt"), lambda layer: NORMS)
    [refusal] = pool_of(1).run(on_ranks.refused, te_job(), local)
    assert refusal.places == ["plan: model.implementation"]


HELD: dict[str, Any] = {"fp8": {"recipe": "delayed", "parameters": True}, "distributed_optimizer": True}
PROFILED: dict[str, Any] = {
    "layernorm": {"norm": "layernorm"},
    "rmsnorm": {"norm": "rmsnorm"},
    "TP2+SP": {"norm": "layernorm", **LAYOUTS["TP2+SP"]},
    "queries and keys normed": {"norm": "layernorm", "qk_norm": True},
    "queries and keys normed, grouped, TP2+SP": {"norm": "rmsnorm", "qk_norm": True, "kv_groups": 2, **LAYOUTS["TP2+SP"]},
    "FP8, delayed": {"norm": "layernorm", "fp8": {"recipe": "delayed"}},
    "FP8, delayed, TP2+SP": {"norm": "rmsnorm", "fp8": {"recipe": "delayed"}, **LAYOUTS["TP2+SP"]},
    "FP8, delayed, weights held, TP2": {"norm": "rmsnorm", **HELD, **LAYOUTS["TP2"]},
    "FP8, current scales, TP2": {"norm": "rmsnorm", "fp8": {"recipe": "tensorwise"}, **LAYOUTS["TP2"]},
}


@pytest.mark.parametrize("profiled", PROFILED)
def test_the_profile_counts_what_the_layer_saves(pool_of, profiled):
    """Byte for byte, without what is eager on a CPU: dropout, biases and rotary positions have kernels of their own on a GPU."""
    shape = {"position": "learned", "bias": False, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    job = te_job(dtype="bf16", **shape, **PROFILED[profiled])
    for seen in pool_of(job.gpus).run(te_on_ranks.saved_bytes, job):
        assert seen == te_on_ranks.predicted_bytes(job)
