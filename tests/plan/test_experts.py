"""Layers of experts: what a rule may say of their MLP half; what it may not is refused with the layers and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from megatron_lynx.anatomy import DENSE, EXPERTS
from megatron_lynx.config.loader import bundled_configs
from megatron_lynx.plan import Plan, dump_plan, load_plan
from megatron_lynx.plan.features import may_fall_back
from megatron_lynx.plan.plan import ModelFacts, ParallelFacts
from tests.plan.strategies import plans
from tests.plan.test_plan_file import KEPT, RECOMPUTED, small_plan

INSIDE = {
    "keep": [*DENSE["attention"].names],
    "recompute": ["pre_mlp_layernorm", "experts_fc1", "experts_activation", "mlp_bda"],
}
SHARED = {"keep": INSIDE["keep"], "recompute": ["pre_mlp_layernorm", "shared_fc1", "shared_activation"]}
ATTENTION = {
    "keep": ["core_attention", "linear_proj", *DENSE["mlp"].names],
    "recompute": ["input_layernorm", "linear_qkv", "rotary", "attention_bda"],
}


def plan_of(moe_layers: list[int | str], **rule: Any) -> dict[str, Any]:
    """Layers 3 and 4, those of stage 1, follow `rule`. `shared_experts` is a fact of the model."""
    data = small_plan()
    data["model"] |= {"moe_layers": moe_layers, "shared_experts": rule.pop("shared_experts", False)}
    data["stages"][1]["ahead_depth"] = 1
    data["stages"][1]["rules"] = [{"layers": "3-4", **rule}]
    return data


def test_dense_plans_do_not_mention_experts() -> None:
    plan = Plan.model_validate(small_plan())
    assert plan.model.moe_layers == ()
    assert "moe_layers" not in dump_plan(plan)


def test_attention_halves_of_experts_are_recomputed() -> None:
    plan = Plan.model_validate(plan_of(["3-4"], **ATTENTION))
    assert "moe_layers: [3-4]" in dump_plan(plan)
    assert [plan.model.has_experts(layer) for layer in range(1, 5)] == [False, False, True, True]


def test_items_of_experts_are_recomputed() -> None:
    plan = Plan.model_validate(plan_of(["3-4"], **INSIDE))
    assert plan.stages[1].rules[0].recomputed_in("mlp") == tuple(INSIDE["recompute"])
    assert Plan.model_validate(plan.model_dump()) == plan
    shared = Plan.model_validate(plan_of(["3-4"], **SHARED, shared_experts=True))
    assert "shared_experts: true" in dump_plan(shared)


@pytest.mark.parametrize(
    ("moe_layers", "rule", "found"),
    [
        ([4], INSIDE, "layers 3-4: found experts_fc1, .* in layer 3, whose MLP is no mixture of experts"),
        (
            [],
            {**INSIDE, "recompute": ["mlp_bda"], "keep": [*INSIDE["keep"], "router"]},
            "found router in layers 3-4",
        ),
        (["3-4"], SHARED, "found shared_fc1, shared_activation in a model without shared experts"),
        (
            ["3-4"],
            {**INSIDE, "recompute": ["router"]},
            "router must be kept: its recomputation would route, count and draw again",
        ),
        (["3-4"], {**INSIDE, "recompute": ["dispatch"]}, "dispatch must be kept: its recomputation would exchange tokens again"),
        (["3-4"], {**INSIDE, "windows": {"mlp": "bwd.attention.0 until experts_fc1 then on_demand"}}, "stops before nothing"),
        (["3-4"], {**INSIDE, "gather": {"mlp": "on_demand"}}, "gather.mlp is given, but shared_fc1 is kept"),
        (
            [4],
            {"keep": KEPT, "recompute": RECOMPUTED},
            "layers 3-4: found .*linear_fc1.* recomputed in layer 4, whose MLP is a mixture",
        ),
        (["3-4"], {**ATTENTION, "windows": {"attention": "bwd.mlp.0"}}, "found bwd.mlp.0 of layers 3-4, which lies in a mixture"),
        ([3, 5], ATTENTION, "model.moe_layers has 5, but the model has layers 1-4"),
    ],
)
def test_what_experts_refuse(moe_layers: list[int | str], rule: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        Plan.model_validate(plan_of(moe_layers, **rule))


@pytest.mark.parametrize(
    ("parallel", "model", "offload", "needed"),
    [
        ({}, {}, None, "experts that are shared out over ranks .parallel.expert.: one rank's load never changes"),
        ({"expert": 2}, {"moe_dispatcher": "deepep"}, {"bytes": 1, "experts": True}, "offload.experts false"),
        ({"expert": 2}, {}, {"bytes": 1, "experts": True}, "offload.experts false: what goes to the host was sent before"),
    ],
)
def test_which_stages_cannot_fall_back(
    parallel: dict[str, Any], model: dict[str, Any], offload: dict[str, Any] | None, needed: str
) -> None:
    """Refused when a plan is read."""
    data = plan_of(["3-4"], **ATTENTION)
    data["parallel"] |= parallel
    data["model"] |= model
    for stage in data["stages"]:
        stage["experts_hold"] = 1.25
        stage["offload"] = offload
    with pytest.raises(ValueError, match=rf"stages.0.experts_hold is 1.25, needed .*{needed}"):
        Plan.model_validate(data)


@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep"])
def test_a_stage_needs_something_to_let_go_of(dispatcher: str) -> None:
    """Rows stay; a rule that runs all of the rest again leaves nothing. Older plans state a load there, and are read."""
    found = {}
    for rule in (INSIDE, ATTENTION):
        data = plan_of(["3-4"], **rule)
        data["parallel"]["expert"], data["model"]["moe_dispatcher"] = 2, dispatcher
        data["stages"][1]["experts_hold"] = 1.25
        plan = Plan.model_validate(data)
        found[str(rule)] = may_fall_back(plan, plan.stages[1])
    assert [*found.values()] == [False, True]


@settings(max_examples=25, deadline=None)
@given(
    plans(
        model=ModelFacts(layers=5, hidden=64, ffn=256, heads=8, kv_groups=8, seq=32, moe_layers=[2, "4-5"]),
        parallel=ParallelFacts(tensor=2, pipeline=2, sequence_parallel=True),
    )
)
@pytest.mark.slow
def test_drawn_plans_name_what_layers_have(plan: Plan) -> None:
    recomputed = {layer: stage.rule_for(layer).recomputed_in("mlp") for stage in plan.stages for layer in stage.layers}
    assert all({*recomputed[layer]} <= {*EXPERTS.recomputable} for layer in (2, 4, 5))
    assert Plan.model_validate(plan.model_dump()) == plan


@pytest.mark.parametrize("path", sorted((bundled_configs() / "plans").glob("*.yaml")), ids=lambda path: path.stem)
def test_ready_plans_hold_twice_the_load_or_fall_back(path: Path) -> None:
    plan = load_plan(path)
    for entry in plan.stages if plan.model.moe_layers else ():
        assert entry.predicted.moe_load is not None
        assert entry.experts_hold is None or entry.experts_hold <= entry.predicted.moe_load < 2, "0: twice the load fits"
