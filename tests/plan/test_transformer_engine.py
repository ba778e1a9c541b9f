"""What a plan may ask of Transformer Engine's layers."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.plan_file import dump_plan
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..config.jobs import catalogued_job
from ..transparency.plans import plan_for, recomputable

TE = {"implementation": "transformer_engine"}


def test_a_plan_that_says_nothing_is_for_local_layers():
    raw = plan_for(tiny_job("gpt"), lambda layer: ()).model_dump(mode="json")
    del raw["model"]["implementation"]
    assert Plan.model_validate(raw).model.implementation == "local"


@pytest.mark.parametrize(("linear", "norm"), [("linear_qkv", "input_layernorm"), ("linear_fc1", "pre_mlp_layernorm")])
def test_a_linear_is_recomputed_with_its_norm(linear, norm):
    plan_for(tiny_job("gpt"), lambda layer: [linear])
    plan_for(tiny_job("gpt", **TE), lambda layer: [linear, norm])
    with pytest.raises(ValidationError, match=f"{linear} is recomputed, and {norm} with it"):
        plan_for(tiny_job("gpt", **TE), lambda layer: [linear])


def test_the_first_window_of_its_own_backward_comes_too_late():
    """Transformer Engine's row-parallel linear reads what it saved before it gathers the gradient; nobody else reads by then."""

    def own_windows(job, *recomputed):
        raw = plan_for(job, lambda layer: ["pre_mlp_layernorm", *recomputed]).model_dump(mode="json")
        for rule in raw["stages"][0]["rules"]:
            rule["windows"] = {"mlp": "bwd.mlp.0"}
        return Plan.model_validate(raw)

    layout = {"tensor": 2, "sequence_parallel": True}
    own_windows(tiny_job("gpt", **layout), "activation")
    own_windows(tiny_job("gpt", **layout, **TE))
    with pytest.raises(ValidationError, match="comes after backward needs the half"):
        own_windows(tiny_job("gpt", **layout, **TE), "activation")


def test_everything_else_may_be_recomputed():
    job = tiny_job("gpt", tensor=2, sequence_parallel=True, **TE)
    assert plan_for(job, lambda layer: recomputable(job, gather=True)).model.implementation == "transformer_engine"


def test_fp8_is_said_where_it_is_used():
    job = tiny_job("gpt", **TE, dtype="bf16", fp8={"recipe": "tensorwise"})
    plan = plan_for(job, lambda layer: ())
    assert plan.model.fp8 == "tensorwise"
    assert "fp8: tensorwise" in dump_plan(plan)
    assert "fp8" not in dump_plan(plan_for(tiny_job("gpt", **TE), lambda layer: ()))


def test_a_norm_that_reduces_its_amax_is_recomputed_on_demand():
    """With one scale for all ranks' parts of its output; a recomputation in a window must not communicate (rule R2)."""
    layout = {"tensor": 2, "sequence_parallel": True, "dtype": "bf16", **TE}
    delayed, tensorwise = (tiny_job("gpt", **layout, fp8={"recipe": recipe}) for recipe in ("delayed", "tensorwise"))
    raw = plan_for(delayed, lambda layer: ["pre_mlp_layernorm"]).model_dump(mode="json")
    raw["model"]["fp8"] = "tensorwise"
    with pytest.raises(ValidationError, match="pre_mlp_layernorm reduces an amax in every call: plan it on demand"):
        Plan.model_validate(raw)
    assert uniform_plan(tensorwise).model.fp8 == "tensorwise"


def test_the_planner_knows_that_such_a_norm_has_no_window():
    layout = {"tensor": 8, "pipeline": 2, "sequence_parallel": True, "distributed_optimizer": True}
    sizes = {"gpus": 16, "batch": 32, "parallel": layout, "budget": {"activation_mib": 1500}}
    job = catalogued_job("llama-7b", policy="planned", fp8="tensorwise", **sizes)
    plan = make_plan(job, analytic_profile(job))
    norms = {"input_layernorm", "pre_mlp_layernorm"}
    assert any(norms & set(rule.recompute) for stage in plan.stages for rule in stage.rules)
