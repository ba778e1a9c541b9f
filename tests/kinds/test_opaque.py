"""Halves that nobody looks into are priced by what a job says of them, and no plan touches them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.config.experts import MARGIN, Opaque
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.cost.parameters import stage_parameters
from megatron_lynx.errors import ConfigError
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.plan.plan_file import dump_plan, load_plan
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import rehearse
from tests.config.jobs import catalogued_job
from tests.uniform import uniform_plan

FIGURES = {"parameters": 67_000_000, "kept_bytes": 90_000, "in_hand_bytes": 80_000, "flops": 150_000_000}


def job_of(layers: tuple[int | str, ...] = (1, "3-4"), **changes: Any) -> Job:
    """Llama 3 8B with four layers, some of which have a fork's attention."""
    layout = {"tensor": 2, "sequence_parallel": True}
    job = catalogued_job("llama3-8b", "h100-80g", gpus=2, batch=8, parallel=layout, policy="planned")
    opaque = Opaque.model_validate({"kind": "own_attention", **FIGURES, "layers": layers})
    model = job.model.model_copy(update={"layers": 4, "opaque": (opaque,), **changes})
    return Job.model_validate({**job.model_dump(by_alias=True), "model": model.model_dump()})


def test_what_nobody_looks_into_is_priced_with_a_margin() -> None:
    job = job_of()
    shape, [figures] = LayerShape.of(job), job.model.opaque
    profile = analytic_profile(job)
    half = profile.opaque["own_attention"]
    inside = MARGIN * figures.kept_bytes * shape.tokens / 2
    assert half.saved_bytes == pytest.approx(2 * shape.input_bytes + inside, abs=1)
    assert half.forward_s > 2 * profile.link_s("all_reduce", shape.gathered_bytes) / 2 > 0
    usual, face = planning_of(job.model.sections(2)[0]), planning_of(job.model.sections(1)[0])
    more = face.parameters(job.model, job.parallel).cut - usual.parameters(job.model, job.parallel).cut
    plain = job_of(())
    assert stage_parameters(job, 0).matrices - stage_parameters(plain, 0).matrices == 3 * more // 2


def test_plans_keep_it_and_recompute_what_is_beside_it(tmp_path: Any) -> None:
    job = job_of()
    profile = analytic_profile(job)
    kept = rehearse(uniform_plan(job, "none"), profile).memory(0).peak_bytes
    tight = job.model_copy(update={"budget": Budget(activation_mib=0.8 * kept / 2**20)})
    plan = make_plan(tight, profile)
    (tmp_path / "plan.yaml").write_text(dump_plan(plan))
    assert load_plan(tmp_path / "plan.yaml") == plan
    assert {name: [str(span) for span in spans] for name, spans in plan.model.opaque_layers.items()} == {
        "own_attention": ["1", "3-4"]
    }
    recomputed = {layer: rule.checkpoint or rule.recompute for rule in plan.stages[0].rules for layer in rule.layers}
    assert any(recomputed[layer] for layer in (1, 3, 4))
    assert all(rule.checkpoint in (None, "mlp") for rule in plan.stages[0].rules if set(rule.layers) & {1, 3, 4})
    assert rehearse(plan, profile).memory(0).peak_bytes <= 0.8 * kept


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"checkpoint": "layer"}, "needed own_attention kept whole"),
        ({"checkpoint": "attention"}, "needed own_attention kept whole"),
        ({"recompute": ["input_layernorm"]}, "found input_layernorm recomputed, needed own_attention kept whole"),
    ],
)
def test_rules_that_look_into_it_are_refused(rule: dict[str, Any], said: str) -> None:
    plan = uniform_plan(job_of(("1-4",)), "none").model_dump(mode="json", exclude_defaults=True)
    [own] = plan["stages"][0]["rules"]
    again = {"layer": own["keep"], "attention": own["keep"][:3]}.get(rule.get("checkpoint", ""), rule.get("recompute", []))
    own.update({**rule, "keep": [item for item in own["keep"] if item not in again]})
    with pytest.raises((ConfigError, ValueError), match=said):
        type(uniform_plan(job_of())).model_validate(plan)


def test_a_sequence_that_is_cut_is_refused() -> None:
    job = job_of()
    cut = job.parallel.model_copy(update={"context": 2})
    with pytest.raises(ConfigError, match="1 with own_attention"):
        uniform_plan(job.model_copy(update={"parallel": cut, "gpus": 4}))


def test_layers_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"opaque\.0\.layers has 5, but the model has layers 1-4"):
        job_of((5,))
