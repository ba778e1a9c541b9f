"""Plans for latent attention: their items, what may run again in them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.anatomy import LATENT, MLP
from megatron_lynx.errors import ConfigError
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.plan_file import dump_plan, load_plan
from megatron_lynx.validation import validated

SIZES = {"q_rank": 48, "kv_rank": 32, "head_size": 16, "rope_size": 8, "value_head_size": 16}


def plan_data(*, compressed: bool = True, recompute: tuple[str, ...] = (), **parallel: Any) -> dict[str, Any]:
    items = (*LATENT[compressed, False].names, *MLP.names)
    sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if compressed or name != "q_rank"}
    facts = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "kv_groups": 4, "seq": 32, "latent_attention": sizes}
    rule = {"layers": "1-2", "keep": [item for item in items if item not in recompute], "recompute": list(recompute)}
    return {
        "version": 1,
        "model": facts | {"implementation": "transformer_engine"},
        "parallel": {"tensor": 1, "pipeline": 1, **parallel},
        "batch": {"micro": 1, "microbatches": 2},
        "stages": [{"stage": 0, "layers": "1-2", "ahead_depth": 0, "rules": [rule]}],
        "provenance": {"made_by": "a test"},
    }


def problems(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        validated(Plan, data, "plan.yaml")
    return str(refused.value)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_plan_of_latent_attention_is_read_as_it_was_written(compressed: bool, tmp_path: Any) -> None:
    recompute = ("input_layernorm", "kv_layernorm", "linear_kv_up_proj", "rotary")
    plan = validated(Plan, plan_data(compressed=compressed, recompute=recompute), "plan.yaml")
    text = dump_plan(plan)
    (tmp_path / "plan.yaml").write_text(text)
    assert load_plan(tmp_path / "plan.yaml") == plan
    assert dump_plan(load_plan(tmp_path / "plan.yaml")) == text
    assert " ".join(LATENT[compressed, False].names) in text.split("version")[0]
    assert plan.stages[0].rules[0].recomputed_in("attention") == recompute
    assert plan.model.halves["attention"] is LATENT[compressed, False]


def test_a_rule_speaks_of_the_attention_that_the_model_has() -> None:
    other = plan_data(compressed=False)
    other["model"]["latent_attention"] = SIZES
    assert "needed input_layernorm, linear_q_down_proj" in problems(other)
    dense = plan_data()
    del dense["model"]["latent_attention"]
    assert "needed input_layernorm, linear_qkv" in problems(dense)
    mixed = plan_data()
    mixed["stages"][0]["rules"][0]["keep"].append("linear_qkv")
    assert "linear_qkv is no item of a layer that has linear_q_down_proj" in problems(mixed)


@pytest.mark.parametrize(
    ("recompute", "missing"),
    [
        (("q_layernorm", "rotary"), "linear_q_up_proj"),
        (("q_layernorm", "linear_q_up_proj"), "rotary"),
        (("q_layernorm", "core_attention"), "linear_q_up_proj, rotary"),
        (("q_layernorm", "kv_layernorm", "linear_kv_up_proj", "attention_bda"), "linear_q_up_proj, rotary"),
    ],
)
def test_what_a_fused_kernel_turns_in_place_is_not_turned_twice(recompute: tuple[str, ...], missing: str) -> None:
    """All that runs the kernel again runs the linear again, whose output it overwrites."""
    data = plan_data(recompute=recompute)
    validated(Plan, data, "plan.yaml")
    data["model"]["latent_attention"]["fused_rotary"] = True
    assert f"{missing} is kept, needed recomputed" in problems(data)
    [rule] = data["stages"][0]["rules"]
    rule["recompute"] += missing.split(", ")
    rule["keep"] = [item for item in rule["keep"] if item not in rule["recompute"]]
    validated(Plan, data, "plan.yaml")


def test_where_a_linear_is_kept_what_its_output_is_turned_in_is_kept() -> None:
    """Uncompressed queries read the residual stream, which nobody gathers twice."""
    section = LATENT[False, True]
    assert {"linear_q_proj", "rotary", "core_attention"} <= set(section.recomputable_among(1))
    assert section.recomputable_among(1, sequence_parallel=True)[-1] == "linear_kv_up_proj"
    assert "core_attention" in LATENT[False, False].recomputable_among(1, sequence_parallel=True)


def test_what_gathers_the_residual_stream_is_kept() -> None:
    sliced = {"tensor": 2, "sequence_parallel": True}
    text = problems(plan_data(compressed=False, recompute=("linear_q_proj",), **sliced))
    assert "linear_q_proj is recomputed, but gathers the residual stream" in text
    validated(Plan, plan_data(recompute=("linear_kv_up_proj", "kv_layernorm"), **sliced), "plan.yaml")
    validated(Plan, plan_data(recompute=("linear_kv_down_proj",), **sliced), "plan.yaml")


@pytest.mark.parametrize(
    ("linear", "too_early", "in_time"),
    [
        ("linear_proj", "bwd.attention.0", "bwd.attention.1"),
        ("linear_q_up_proj", "bwd.attention.3", "bwd.attention.4"),
        ("linear_q_down_proj", "bwd.attention.5", "bwd.mlp.0-1"),
    ],
)
def test_with_one_micro_batch_a_weight_gradient_waits_for_what_comes_behind(linear: str, too_early: str, in_time: str) -> None:
    """In time is the wait for the gradient of its own input; for down-projections no wait of the half is."""
    data = plan_data(tensor=2, sequence_parallel=True)
    data["batch"]["microbatches"] = 1
    [stage] = data["stages"]
    [rule] = stage["rules"]
    stage["weight_gradients"] = {"bytes": 1 << 20}
    stage["rules"] = [rule | {"layers": 1}, rule | {"layers": 2, "weight_gradients": {linear: [in_time]}}]
    validated(Plan, data, "plan.yaml")
    stage["rules"][1]["weight_gradients"] = {linear: [too_early]}
    assert f"weight_gradients.{linear} names {too_early}, which comes before its own backward" in problems(data)


def test_what_is_not_planned_with_latent_attention_is_refused_by_name() -> None:
    gathered = plan_data(recompute=("linear_kv_up_proj", "kv_layernorm"), tensor=2, sequence_parallel=True)
    gathered["stages"][0]["rules"][0]["gather"] = {"attention": "on_demand"}
    assert "the half's input is gathered for no single linear" in problems(gathered)
    deferred = plan_data(compressed=False, tensor=2)
    deferred["stages"][0]["rules"][0]["weight_gradients"] = {"linear_q_up_proj": ["bwd.mlp.0"]}
    linears = "linear_kv_down_proj, linear_q_proj, linear_kv_up_proj, linear_proj, linear_fc1, linear_fc2"
    assert f"weight_gradients.linear_q_up_proj is no linear of a layer: there are {linears}" in problems(deferred)
    alone = problems(plan_data(recompute=("linear_kv_up_proj",)))
    assert "linear_kv_up_proj is recomputed, and kv_layernorm with it" in alone
