"""What plans with checkpoints hold from forward to backward, counted beside stock Megatron under the settings they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.solver.answer import Solved
from megatron_lynx.solver.options import HalfOptions, StageProblems
from megatron_lynx.testbed.ranks import RankPool
from tests.long import long
from tests.measure.on_ranks import held
from tests.profiler.made_up import made_up_profile
from tests.te_releases import pool_with, pools_with
from tests.tiny_jobs import tiny_job
from tests.transparency import test_latent
from tests.transparency.checkpoints import FULL, ahead, checkpointed, with_rest_in_wait, without_beginning, without_copies
from tests.transparency.plans import plan_for

Pools = Callable[[int], RankPool]

SIZE: dict[str, int] = {"layers": 4, "seq": 128, "micro": 2, "hidden": 64, "ffn": 256, "microbatches": 1}


def kept_but_for(job: Job, checkpoint: Any, layers: Any = None) -> Plan:
    return checkpointed(plan_for(job, lambda layer: ()), checkpoint, layers)


def uniform(layers: int) -> dict[str, Any]:
    return {**FULL, "recompute_num_layers": layers}


def block(layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}


SETTINGS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "none": ({}, "layer", ()),
    "uniform 1": (uniform(1), "layer", None),
    "uniform 2": (uniform(2), {"layers": 2}, None),
    "uniform 4": (uniform(4), {"layers": 4}, None),
    "block 1": (block(1), "layer", (1,)),
    "block 3": (block(3), "layer", (1, 2, 3)),
}
"""Stock's fields, and the checkpoint with the layers that have it."""


STATES = 3 * torch.get_rng_state().nbytes
"""What a checkpoint of stock's remembers: the CPU's random state, the device's, and the tracker's. Where nothing drops out ours
remember none. On GPUs all but a few bytes of it are on the host."""
IN_FLIGHT = 2 * SIZE["seq"] * SIZE["micro"] * 4
"""gloo's thread may still hold the results of reductions, a float for each token."""


CONTAINED = ("uniform 2", "uniform 4", "block 3")
"""Settings that differ from others in a number alone: of one rank, with an MLP in each layer."""


def counted(pool: RankPool, job: Job) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """By rank and setting: what is held from forward to backward and at the step's peak, of stock and of ours."""
    all_of_them = job.gpus == 1 and job.model.experts is None
    settings = {name: setting for name, setting in SETTINGS.items() if all_of_them or name not in CONTAINED}
    stock = [(one, None) for one, _, _ in settings.values()]
    ours = [({}, kept_but_for(job, checkpoint, layers)) for _, checkpoint, layers in settings.values()]
    for found in pool.run(held, job, [*stock, *ours]):
        yield from zip(settings, found[: len(settings)], found[len(settings) :], strict=True)


@pytest.mark.parametrize("fields", [{"like": "llama"}, {"tensor": 2, "sequence_parallel": True}, *long({})], ids=str)
def test_full_recomputation_holds_as_much(own_pool_of: Pools, fields: dict[str, Any]) -> None:
    """To the byte, but for random states, and no more at the peak: nothing is made again that stock does not make."""
    job = tiny_job(**{**SIZE, **fields})
    for name, (stocks, stocks_peak), (ours, ours_peak) in counted(own_pool_of(job.gpus), job):
        checkpoints = {"uniform 1": 4, "uniform 2": 2, "uniform 4": 1, "block 1": 1, "block 3": 3}.get(name, 0)
        assert -STATES * checkpoints - IN_FLIGHT <= ours - stocks <= IN_FLIGHT, name
        assert ours_peak <= stocks_peak + IN_FLIGHT, name


@pytest.mark.parametrize("ffn", [512, *long(256)])
def test_what_begins_ahead_makes_no_moment_fuller(own_pool_of: Pools, ffn: int) -> None:
    """Counted on ranks, where the planner says so: beside MLP halves that are large enough for two attentions at once."""
    job = tiny_job("llama", **{**SIZE, "tensor": 2, "sequence_parallel": True, "ffn": ffn})
    planned = job.model_copy(update={"policy": "planned"})
    problem = StageProblems(planned, HalfOptions(planned, made_up_profile(job))).of(0)
    ways = [tuple(choices.joined[min(way, len(choices.joined) - 1)] for choices in problem.halves) for way in range(3)]
    at_once, *begun_bytes = (Solved(way, 1).peak_bytes for way in ways)
    assert ways[2][0].checkpoint is not None
    assert ways[2][0].checkpoint.gathers_ahead
    assert [size <= at_once for size in begun_bytes] == [ffn == 512] * 2
    late = kept_but_for(job, "layer")
    plans = [late, ahead(late), ahead(late, how="gather")]
    for peaks in own_pool_of(job.gpus).run(held, job, [({}, plan) for plan in plans]):
        (_, on_demand), *begun = peaks
        assert [peak <= on_demand + IN_FLIGHT for _, peak in begun] == [ffn == 512] * 2


@pytest.mark.parametrize("ffn", [128, *long(512)])
def test_what_goes_on_in_a_wait_makes_no_moment_fuller(own_pool_of: Pools, ffn: int) -> None:
    """A gathered gradient is there while a half runs again, and was there beside all of it a moment later."""
    job = tiny_job("llama", **{**SIZE, "tensor": 2, "sequence_parallel": True, "ffn": ffn})
    late = kept_but_for(job, "layer")
    for (_, at_once), (_, gone_on) in own_pool_of(job.gpus).run(held, job, [({}, late), ({}, with_rest_in_wait(late))]):
        assert gone_on <= at_once + IN_FLIGHT


def test_where_experts_go_on_in_a_wait_rows_that_were_sorted_are_gone(te_pools: Pools) -> None:
    """The code around still has what arrived; gradients that are sent and received take its place."""
    fields = {"expert": 2, "replicas": 2, "experts": {"count": 4, "per_token": 2, "ffn": 64}}
    job = tiny_job("llama", **{**SIZE, **fields, "implementation": "transformer_engine"})
    plan = ahead(kept_but_for(job, "layer"), expert=2)
    late = without_beginning(plan)
    cases = [({"moe_grouped_gemm": True}, each) for each in (late, with_rest_in_wait(late), plan, with_rest_in_wait(plan))]
    for found in te_pools(job.gpus).run(held, job, cases):
        (_, at_once), (_, gone_on), (_, begun), (_, begun_and_gone_on) = found
        assert gone_on <= at_once + IN_FLIGHT
        assert begun_and_gone_on <= begun + IN_FLIGHT


@pytest.mark.parametrize("recipe", ["delayed", *long("blockwise")])
def test_in_fp8_full_recomputation_holds_as_much_as_where_no_copies_stay(te_pool: RankPool, recipe: str) -> None:
    """A layer's last linear keeps a quarter of what its MLP half saves, a copy of what it reads, if it does not run again."""
    fields = {**SIZE, "layers": 2, "implementation": "transformer_engine", "dtype": "bf16", "fp8": {"recipe": recipe}}
    job = tiny_job("llama", **fields)
    kept = kept_but_for(job, "layer")
    cases = [(uniform(1), None), ({}, without_copies(kept)), ({}, kept)]
    [((stocks, stocks_peak), (ours, ours_peak), (with_copies, _))] = te_pool.run(held, job, cases)
    assert -2 * STATES - IN_FLIGHT <= ours - stocks <= IN_FLIGHT
    assert ours_peak <= stocks_peak + IN_FLIGHT
    assert with_copies > ours + 2 * job.model.seq * job.batch.micro * job.model.ffn // 2


EXPERTS = {"count": 4, "per_token": 2, "ffn": 32, "layers": "all", "shared_ffn": 32}
ROUTED = 48
"""Bytes of a token in a layer that a router's decision takes here: probabilities and flags of four experts, their softmax, and
the places of its two rows (8 bytes each), by which combining brings them back."""


def test_with_experts_what_the_router_decided_is_held_beside_it(own_pool_of: Pools) -> None:
    job = tiny_job(**{**SIZE, "experts": EXPERTS, "bias": False})
    tokens = SIZE["seq"] * SIZE["micro"]
    for name, (stocks, _), (ours, _) in counted(own_pool_of(1), job):
        layers = {"none": 0, "block 1": 1}.get(name, 4)
        assert -STATES * layers <= ours - stocks <= ROUTED * tokens * layers + IN_FLIGHT, name


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def recomputing(job: Job, *items: str) -> Plan:
    return plan_for(job, lambda layer: items, windows=False)


@pytest.fixture(scope="module")
def te_pools() -> Iterator[Pools]:
    yield from pools_with("2.9")


@pytest.fixture(scope="module")
def te_pool() -> Iterator[RankPool]:
    with pool_with("2.9", 1) as pool:
        yield pool


def of_modules(kind: str) -> tuple[Job, list[tuple[dict[str, Any], Plan]]]:
    """A job, and some of stock's `recompute_modules`, each with the plan that stands for it."""
    experts = {"layers": 2, "experts": EXPERTS, "bias": False}
    if kind == "dense":
        job = tiny_job("llama", **{**SIZE, "layers": 2})
        core, mlp = ("core_attention",), ("linear_fc1", "activation")
        pairs = [(("core_attn",), core), (("mlp",), mlp), (("core_attn", "mlp"), core + mlp)]
    elif kind == "experts":
        job = tiny_job("llama", **{**SIZE, **experts})
        pairs = [(("shared_experts",), ("shared_fc1", "shared_activation"))]
    elif kind == "Transformer Engine's experts":
        job = tiny_job("llama", **{**SIZE, **experts, "implementation": "transformer_engine", "dtype": "bf16"})
        norm, activation = ("pre_mlp_layernorm",), ("experts_activation",)
        pairs = [(("moe_act",), activation), (("layernorm",), norm), (("layernorm", "moe_act"), norm + activation)]
    else:
        job = tiny_job("gpt", **{**SIZE, "layers": 2, "latent": test_latent.SIZES, "implementation": "transformer_engine"})
        up = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj", "rotary")
        return job, [(selective("mla_up_proj"), test_latent.latent_plan(job, up))]
    found = [(selective(*modules), recomputing(job, *items)) for modules, items in pairs]
    if kind == "experts":
        found.append((selective("moe"), kept_but_for(job, "mlp")))
        found.append((selective("moe", "core_attn"), checkpointed(recomputing(job, "core_attention"), "mlp")))
    return job, found


MORE_IS_DROPPED = (["core_attn"], ["core_attn", "mlp"], ["moe"], ["moe", "core_attn"])
"""Where ours holds less: beside a checkpoint of the core attention stock keeps queries and keys as they were turned, and what the
attention returned; beside one of `moe`, what the norm before it made."""


@pytest.mark.parametrize("kind", ["dense", "experts", "Transformer Engine's experts", "latent attention"])
def test_modules_of_stock_are_sets_of_items(te_pool: RankPool, kind: str) -> None:
    job, pairs = of_modules(kind)
    model = {"moe_grouped_gemm": True, "bias_activation_fusion": True} if kind.startswith("Transformer") else {}
    cases = [({**model, **fields}, None) for fields, _ in pairs] + [(model, plan) for _, plan in pairs]
    [found] = te_pool.run(held, job, [({**model}, None), *cases])
    for (fields, _), (stocks, _), (ours, _) in zip(pairs, found[1 : len(pairs) + 1], found[len(pairs) + 1 :], strict=True):
        modules = fields["recompute_modules"]
        remembered = STATES * len(modules) * job.model.layers
        assert ours <= stocks * 1.001, modules
        assert found[0][0] > stocks, modules
        if modules not in MORE_IS_DROPPED:
            assert stocks - ours <= remembered + IN_FLIGHT, modules
