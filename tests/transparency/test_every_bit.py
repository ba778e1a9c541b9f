"""Losses, every gradient and every weight equal stock's in every bit, and the recomputations are those that the plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.anatomy import DENSE
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from tests.long import long, with_models
from tests.plan.strategies import plans_for, samples
from tests.tiny_jobs import tiny_job
from tests.transparency import learned_activation
from tests.transparency.expected import expected
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.trials import Outcome, Trial, compare_with_stock

Pools = Callable[[int], RankPool]

TURNS = {"pipeline": 2, "microbatches": 4, "partition": (1, 2, 2, 1)}
"""Two chunks on each of two stages, not all alike."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2": {"tensor": 2},
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2, "microbatches": 4},
    "TP2xPP2": {"tensor": 2, "pipeline": 2, "microbatches": 4},
    "TP2xPP2+SP": {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "microbatches": 4},
    "PP2 with 3+1 layers": {"pipeline": 2, "microbatches": 4, "partition": (3, 1)},
    "PP2xVPP2": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
    "TP2xPP2xVPP2+SP": {"tensor": 2, "sequence_parallel": True, "layers": 6, **TURNS},
}


def checked(pool_of: Pools, job: Job, candidates: list[Plan], trial: Trial | None = None) -> list[list[Outcome]]:
    """Run every plan on every rank; outcomes by rank. Equality, counts and leftovers are asserted here."""
    results = pool_of(job.gpus).run(compare_with_stock, job, candidates, trial or Trial())
    for rank, outcomes in enumerate(results):
        stage = rank // (job.gpus // job.parallel.pipeline)
        for plan, outcome in zip(candidates, outcomes, strict=True):
            assert outcome.differing == [], f"rank {rank}, plan {plan.model_dump_json()}"
            assert outcome.planned.frames_left == 0
            for counts in outcome.planned.counts:
                needed = expected(job, plan, stage)
                found = (counts.recorded, counts.in_windows, counts.gathered)
                assert found == (needed.recomputed, needed.hidden, needed.gathered), plan.model_dump_json()
                assert 0 <= needed.recomputed - counts.recomputed <= needed.nothing_behind_gather, plan.model_dump_json()
    return results


COMBINED = ("TP2xPP2", "TP2xPP2+SP")
"""Layouts whose every part is in the interleaved one."""
IN_RANDOM_PLANS = "TP2xPP2xVPP2+SP"
"""Whose every part is in another layout, and which random plans have as a whole."""


@with_models(LAYOUTS, (*COMBINED, "PP2", IN_RANDOM_PLANS))
def test_kept_recomputed_and_mixed(pool_of: Pools, layout: str, like: Any) -> None:
    job = tiny_job(like, **LAYOUTS[layout])
    everything = recomputable(job)
    candidates = [
        plan_for(job, lambda layer: ()),
        plan_for(job, lambda layer: everything, windows=False),
        plan_for(job, lambda layer: everything),
        plan_for(job, lambda layer: [item for item in everything if (item in DENSE["attention"].names) == bool(layer % 2)]),
        plan_for(job, lambda layer: ["input_layernorm", "pre_mlp_layernorm", "activation"]),
    ]
    if job.chunks > 1:
        candidates.append(plan_for(job, lambda layer: everything, whole={"of_every": 2, "first": 1}))
    if job.parallel.sequence_parallel:
        with_gemms = recomputable(job, gather=True)
        candidates += [plan_for(job, lambda layer: with_gemms, windows=False), plan_for(job, lambda layer: with_gemms)]
        candidates.append(plan_for(job, lambda layer: ["linear_qkv", "linear_fc1"]))
    checked(pool_of, job, candidates, Trial(steps=2))


@with_models((layout for layout in reversed(LAYOUTS) if "3+1" not in layout), (*COMBINED, "PP2", "PP2xVPP2", "TP2"))
def test_random_plans(pool_of: Pools, layout: str, like: Any) -> None:
    job = tiny_job(like, **LAYOUTS[layout])
    checked(pool_of, job, samples(plans_for(job, whole=True), 5), Trial(steps=1))


OVERLAPPED = {"ddp": True, "overlap_grad_reduce": True, "optimizer": "megatron"}
VARIANTS: dict[str, tuple[dict[str, Any], Trial]] = {
    "bf16": ({"tensor": 2, "dtype": "bf16"}, Trial()),
    "bf16, sequence parallel": ({"tensor": 2, "sequence_parallel": True, "dtype": "bf16"}, Trial()),
    "query and key norms": ({"tensor": 2}, Trial(model={"qk_layernorm": True})),
    "wide heads, squared ReLU": ({"tensor": 2, "kv_channels": 16, "activation": "squared_relu"}, Trial()),
    "Megatron's DDP": ({"tensor": 2}, Trial(steps=2, training={"ddp": True, "optimizer": "megatron"})),
    "reductions in backward": (
        {"replicas": 2},
        Trial(steps=2, training={"ddp": True, "overlap_grad_reduce": True, "optimizer": "megatron"}),
    ),
    "distributed optimizer with fused weight gradients, bf16": (
        {"replicas": 2, "distributed_optimizer": True, "dtype": "bf16"},
        Trial(
            steps=2,
            training=OVERLAPPED,
            model={"gradient_accumulation_fusion": True},
            compared="weights",
        ),
    ),
    "parameters gathered in forward": (
        {"replicas": 2, "distributed_optimizer": True},
        Trial(steps=3, training={**OVERLAPPED, "overlap_param_gather": True}, compared="weights"),
    ),
    "fused weight gradients, sequence parallel": (
        {"tensor": 2, "sequence_parallel": True},
        Trial(training={"ddp": True, "overlap_grad_reduce": True}, model={"gradient_accumulation_fusion": True}),
    ),
    "backward in a second thread": ({"tensor": 2}, Trial(backward_thread=True)),
    "backward in a second thread, pipeline": ({"pipeline": 2, "microbatches": 4}, Trial(backward_thread=True)),
    "batched exchanges": ({"pipeline": 2, "microbatches": 4}, Trial(model={"batch_p2p_comm": True})),
    "fewer micro-batches than stages": ({"pipeline": 2, "microbatches": 1}, Trial()),
    "one key/value group, biases on QKV only": ({"kv_groups": 1, "bias": False}, Trial(model={"add_qkv_bias": True})),
}


@with_models(VARIANTS)
def test_variants(pool_of: Pools, layout: str, like: Any) -> None:
    fields, trial = VARIANTS[layout]
    job = tiny_job(like, **fields)
    gather = job.parallel.sequence_parallel
    checked(pool_of, job, [plan_for(job, lambda layer: recomputable(job, gather=gather))], trial)


def test_an_activation_with_parameters_of_its_own(pool_of: Pools) -> None:
    """xIELU of Swiss AI's fork: two numbers that are learned, in code between two sites, and graded once."""
    job = tiny_job("gpt", tensor=2, activation="squared_relu")
    for outcomes in pool_of(2).run(
        learned_activation.compare, job, [plan_for(job, lambda layer: recomputable(job))], Trial(steps=2)
    ):
        assert [outcome.differing for outcome in outcomes] == [[]]
        assert outcomes[0].planned.counts[-1].recomputed > 0


@pytest.mark.parametrize("like", ["gpt", *long("llama")])
def test_deeper_ahead(pool_of: Pools, like: Any) -> None:
    """Three frames ahead: the windows of the layer above and the one above that."""
    job = tiny_job(like, tensor=2)
    plan = plan_for(job, lambda layer: recomputable(job), ahead_depth=3)
    raw = plan.model_dump(mode="json")
    for rule in raw["stages"][0]["rules"][:-2]:
        rule["windows"] = {"attention": "bwd.mlp.0+1", "mlp": "bwd.attention.0+2"}
    deeper = Plan.model_validate(raw)
    checked(pool_of, job, [deeper])
