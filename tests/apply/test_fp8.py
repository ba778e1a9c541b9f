"""FP8 under plans: Transformer Engine's own Python, its compiled extension stood in for. Not run on a GPU.

Compared with stock in every bit, beside losses, gradients and weights: scales, amax histories and the lists of them that are
reduced, quantized weights, usages of quantizers, and the autocast's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from megatron_lynx.anatomy import ATTENTION
from megatron_lynx.testbed.ranks import RankPool
from tests.stock.parts import stage_parts
from tests.tiny_jobs import tiny_job

from ..layouts import LAYOUTS
from ..long import long
from ..plan.strategies import plans_for, samples
from ..te_releases import pools_with
from ..transparency.offloaded import offloading
from ..transparency.plans import plan_for, recomputable
from ..transparency.test_every_bit import checked
from ..transparency.trials import Trial, compare_with_stock
from . import fp8_on_ranks, on_ranks

NORMS = ("input_layernorm", "pre_mlp_layernorm")
CASES: list[Any] = [
    *long(("delayed", "gpt", "one rank", {})),
    *long(("delayed", "llama", "tp", {"tp_only_amax_red": True, "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"})),
    ("delayed", "llama", "tp+sp", {"qk_layernorm": True}),
    *long(("delayed", "gpt", "pp", {"disable_parameter_transpose_cache": True})),
    *long(("tensorwise", "llama", "tp+sp", {}), ("tensorwise", "llama", "pp", {})),
]


def fp8_job(recipe: str = "delayed", like: Any = "llama", **fields: Any) -> Any:
    return tiny_job(like, implementation="transformer_engine", dtype="bf16", **{"fp8": {"recipe": recipe}, **fields})


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    yield from pools_with("2.9")


@pytest.mark.parametrize(
    ("recipe", "like", "layout", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_recomputed_and_mixed(pool_of, recipe, like, layout, settings):
    """Micro-batches change the scales of delayed scaling, and recomputations come when later ones have."""
    job = fp8_job(recipe, like, **LAYOUTS[layout])
    everything, windows = recomputable(job, gather=True), (recipe, layout) != ("tensorwise", "tp+sp")
    candidates = [
        plan_for(job, lambda layer: NORMS, windows=False),
        plan_for(job, lambda layer: everything, windows=windows),
        plan_for(job, lambda layer: [i for i in everything if (i in ATTENTION.names) == bool(layer % 2)], windows=windows),
    ]
    checked(pool_of, job, candidates, Trial(steps=3, model=settings))


def test_layers_at_the_ends_that_stay_in_bf16(pool_of):
    """The plan says how many, and they are recomputed in bf16."""
    job = fp8_job("tensorwise", "gpt", fp8={"recipe": "tensorwise", "first_in_bf16": 1, "last_in_bf16": 1})
    plan = plan_for(job, lambda layer: recomputable(job))
    assert (plan.model.first_in_bf16, plan.model.last_in_bf16) == (1, 1)
    checked(pool_of, job, [plan], Trial(steps=3))


HELD: dict[str, Any] = {"parameters": True}
"""Weights that are held in FP8, which only the distributed optimizer steps."""
STEPPED: dict[str, Any] = {
    "training": {"optimizer": "megatron", "ddp": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "model": {"gradient_accumulation_fusion": True},
}


def held_job(recipe: str = "delayed", **fields: Any) -> Any:
    return fp8_job(recipe, fp8={"recipe": recipe, **HELD}, distributed_optimizer=True, **fields)


@pytest.mark.parametrize(
    ("recipe", "layout", "replicas"),
    [
        ("delayed", "pp", 1),
        *long(
            ("tensorwise", "tp+sp", 1),
            ("delayed", "tp", 2),
            ("tensorwise", "one rank", 2),
            ("delayed", "tp+sp", 1),
            ("tensorwise", "pp", 1),
        ),
    ],
)
def test_weights_that_are_held_in_fp8(pool_of, recipe, layout, replicas):
    """Parameters are wrappers around bytes: nodes save these, DDP and the optimizer find their gradients on the wrappers."""
    job = held_job(recipe, replicas=replicas, **LAYOUTS[layout])
    everything, windows = recomputable(job, gather=True), (recipe, layout) != ("tensorwise", "tp+sp")
    candidates = [
        plan_for(job, lambda layer: NORMS, windows=False),
        plan_for(job, lambda layer: everything, windows=windows),
    ]
    compared = "everything" if replicas == 1 else "weights"
    checked(pool_of, job, candidates, Trial(steps=3, compared=compared, **STEPPED))


def test_the_bytes_of_weights_that_are_held_in_fp8(pool_of):
    """DDP has a buffer of bytes and one of the others; by columns weights have memory of their own."""
    job = held_job(replicas=2, hidden=64)  # parameters begin at multiples of 64 numbers
    memory = stage_parts(job.model_copy(update={"policy": "none"}), 0).fullest
    predicted = {name: getattr(memory, name) for name in ("parameters", "gradients", "fp8_weights")}
    assert pool_of(2).run(fp8_on_ranks.buffers, job, Trial(training={"optimizer": "megatron", "ddp": True})) == [predicted] * 2


def test_random_plans(pool_of):
    job = fp8_job(**LAYOUTS["tp+sp"])
    checked(pool_of, job, samples(plans_for(job, whole=True), 2), Trial(steps=2))


def test_nothing_that_was_let_go_is_read(pool_of):
    """Bytes of FP8 that were let go are overwritten with NaN, but never the weights that all micro-batches share."""
    for job, items, trial in ((fp8_job(), recomputable(fp8_job()), {}), (fp8_job(), NORMS, {}), (held_job(), NORMS, STEPPED)):
        plan = plan_for(job, lambda layer, items=items: items)
        [[outcome]] = pool_of(1).run(compare_with_stock, job, [plan], Trial(steps=2, canaries=True, **trial))
        assert outcome.differing == []
        assert outcome.planned.overwritten > 0


def test_what_is_kept_may_go_to_the_host(pool_of):
    job = held_job(**LAYOUTS["pp"])
    mixed = plan_for(job, lambda layer: [*NORMS, "core_attention"] if layer % 2 else ())
    [first, last] = checked(pool_of, job, [offloading(mixed, 20_000, pace=5_000)], Trial(steps=2, **STEPPED))
    assert first[0].planned.counts[-1].offloaded_bytes > 0
    assert last[0].planned.counts[-1].offloaded_bytes > 0


@pytest.mark.parametrize(("wrong", "found"), [("amax", "amax_history"), *long(("scale", "weight"))])
def test_a_wrong_recomputation_is_found(pool_of, wrong, found):
    """Counted twice in the history, or made with the scales of now."""
    job = fp8_job(pipeline=2, microbatches=4)
    plan = plan_for(job, lambda layer: recomputable(job), windows=False)
    differing = pool_of(2).run(fp8_on_ranks.with_wrong_recomputations, job, plan, Trial(steps=3), wrong)
    assert all(any(found in name for name in names) for names in differing)


def test_a_checked_step_starts_from_the_scales_of_before(pool_of):
    """Which a module's first forward makes."""
    [(differing, compared)] = pool_of(1).run(fp8_on_ranks.passes_from_one_state, fp8_job(attention_dropout=0.0))
    assert differing == []
    assert compared > 0


def test_what_is_refused(pool_of):
    """All at once."""
    job = fp8_job()
    settings = {"fp8_dot_product_attention": True, "fp8_wgrad": False, "fp8_recipe": "custom"}
    plan = plan_for(job, lambda layer: NORMS)
    [refusal] = pool_of(1).run(on_ranks.refused, job, plan, partial(fp8_on_ranks.spoiled, **settings))
    assert sorted(refusal.places) == sorted([*(f"config.{name}" for name in settings), "NVTE_BACKWARD_OVERRIDE"])
    assert refusal.changed == []


def test_a_plan_for_another_precision_is_refused(pool_of):
    in_bf16 = plan_for(tiny_job("llama", implementation="transformer_engine", dtype="bf16"), lambda layer: NORMS)
    held = plan_for(held_job(), lambda layer: NORMS)
    others = (in_bf16, "fp8"), (plan_for(fp8_job("tensorwise"), lambda layer: NORMS), "fp8"), (held, "fp8_parameters")
    for plan, named in others:
        [refusal] = pool_of(1).run(on_ranks.refused, fp8_job(), plan)
        assert refusal.places == [f"plan: model.{named}"]
