"""Sizes and FLOPs of a recomputation, against the real runtime and the real megatron-core: every set of items there is."""

from __future__ import annotations

from itertools import combinations

import pytest

from megatron_lynx.anatomy import DENSE, HALVES, ITEMS, ROW_PARALLEL
from megatron_lynx.cost.recompute import recomputation_of, recomputed_flops, sensible_choices
from megatron_lynx.kinds.planning import half_tensors
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.shape import LayerShape
from tests.cost.on_ranks import count
from tests.long import long
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

LAYERS = 8
STATES_PER_HALF = 5
"""A frame remembers at most so many random states, and no two halves the same number; they are no activations."""


def every_set(half):
    items = [item for item in DENSE[half].names if item not in ROW_PARALLEL]
    return [chosen for size in range(len(items) + 1) for chosen in combinations(items, size)]


def all_choices():
    """32 layers that between them recompute every set of both halves, as lists of `LAYERS`."""
    attention, mlp = every_set("attention"), every_set("mlp")
    layers = [(*chosen, *mlp[index % len(mlp)]) for index, chosen in enumerate(attention)]
    return [layers[first : first + LAYERS] for first in range(0, len(layers), LAYERS)]


def plan_of(job, layers) -> Plan:
    data = uniform_plan(job).model_dump(exclude={"stages"})
    rules = [
        {
            "layers": number,
            "recompute": recomputed,
            "keep": tuple(item for item in ITEMS if item not in recomputed),
        }
        for number, recomputed in enumerate(layers, start=1)
    ]
    stage = {"stage": 0, "layers": f"1-{len(layers)}", "ahead_depth": 0, "rules": tuple(rules)}
    return Plan.model_validate({**data, "stages": (stage,)})


@pytest.mark.parametrize(("like", "model"), [("gpt", {}), *long(("llama", {"qk_norm": True}))])
def test_real_recomputations_cost_what_is_predicted(pool_of, like, model):
    job = tiny_job(like, microbatches=1, layers=LAYERS, seq=64, micro=1, **model)
    shape = LayerShape(job.model, job.parallel, 1)
    stock, *planned = pool_of(1).run(count, job, [None, *(plan_of(job, layers) for layers in all_choices())])[0]
    for layers, counted in zip(all_choices(), planned, strict=True):
        assert counted.flops - stock.flops == sum(recomputed_flops(shape, recompute) for recompute in layers)
        saved = sum(stays(shape, ()) - stays(shape, recompute) for recompute in layers)
        states = saved - (stock.resident_bytes - counted.resident_bytes)
        assert -shape.tokens * 8 <= states <= counted.frames * STATES_PER_HALF * counted.state_bytes
        # What is not a random state is what gloo has in flight when the forward returns: a float per token, or two.
        rest = (states + counted.state_bytes // 2) % counted.state_bytes - counted.state_bytes // 2
        assert abs(rest) <= shape.tokens * 8


def stays(shape, recompute):
    return sum(recomputation_of(DENSE[half], half_tensors(shape, half), recompute).stays_bytes for half in HALVES)


def tensors(half, **model):
    return half_tensors(LayerShape(tiny_job("gpt", **model).model, tiny_job().parallel, 2), half)


def test_a_kept_linear_is_passed_with_its_memo():
    kept = tensors("attention")
    recompute = recomputation_of(DENSE["attention"], kept, ("input_layernorm", "rotary", "core_attention"))
    assert recompute.runs == ("input_layernorm", "rotary", "core_attention")
    memo = next(tensor.bytes for tensor in kept if tensor.made_by == "linear_qkv")
    mask = next(tensor.bytes for tensor in kept if tensor.made_by == "attention_bda")
    assert recompute.stays_bytes == memo + mask


def test_a_recomputation_stops_where_nothing_more_is_needed():
    assert recomputation_of(DENSE["mlp"], tensors("mlp"), ("pre_mlp_layernorm",)).runs == ("pre_mlp_layernorm",)
    assert recomputation_of(DENSE["mlp"], tensors("mlp"), ("linear_fc1",)).runs == ()


@pytest.mark.parametrize("half", HALVES)
def test_sensible_choices_reach_from_nothing_to_everything(half):
    choices = list(sensible_choices(DENSE[half], tensors(half)))
    everything = tuple(item for item in DENSE[half].names if item not in ROW_PARALLEL)
    assert choices[0] == ()
    assert choices[-1] == everything
    assert len(set(choices)) == len(choices)
    everything_else = recomputation_of(DENSE[half], tensors(half), everything)
    assert everything_else.stays_bytes == 0
    assert everything_else.regenerated_bytes == sum(tensor.bytes for tensor in tensors(half) if tensor.saved_by)


@pytest.mark.parametrize("half", HALVES)
def test_no_other_set_holds_less_for_as_little_work(half):
    """Sets that are left out bring nothing: a sensible one runs no more and holds no more."""
    blocks = tensors(half)
    sensible = [recomputation_of(DENSE[half], blocks, chosen) for chosen in sensible_choices(DENSE[half], blocks)]
    for chosen in every_set(half):
        one = recomputation_of(DENSE[half], blocks, chosen)
        assert any(set(other.runs) <= set(one.runs) and other.stays_bytes <= one.stays_bytes for other in sensible), chosen
