"""The planner writes no plan that the plan file refuses: drawn jobs at drawn budgets, and those that were found so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_lynx.config import Job
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.errors import ConfigError, Infeasible
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.stock import FULL, NONE, priced
from megatron_lynx.units import GIB
from megatron_lynx.yaml_file import read_yaml

MODELS = ("llama3-8b", "gpt-22b", "deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b")
FP8 = (None, None, "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")


def job_of(
    name: str = "llama3-8b",
    cluster: str = "b200-180g",
    *,
    layers: int = 4,
    recipe: str | None = None,
    experts: dict[str, Any] | None = None,
    microbatches: int = 8,
    **fields: Any,
) -> Job:
    """A few layers of a model. `experts`: what is changed of those that it has."""
    shape: dict[str, Any] = dict(read_yaml(bundled_configs() / "models" / f"{name}.yaml"))
    shape |= {"layers": layers, "implementation": "transformer_engine"}
    if recipe is not None:
        shape["fp8"] = {"format": "e2m1" if recipe == "nvfp4" else "hybrid", "recipe": recipe}
    if "experts" in shape:
        shape["experts"] = shape["experts"] | {"layers": "all"} | (experts or {})
    parallel = {"distributed_optimizer": True, **fields.pop("parallel", {})}
    ranks = parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("context", 1)
    replicas = parallel.get("expert", 1)
    data = {
        "model": shape,
        "cluster": cluster_data(bundled_configs() / "clusters" / f"{cluster}.yaml"),
        "gpus": ranks * replicas,
        "parallel": parallel,
        "batch": {"micro": 1, "global": replicas * microbatches},
        "policy": "planned",
        **fields,
    }
    return Job.model_validate(data)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Everything that decides what may run where: precision, layouts, userbuffers, experts and how their rows travel."""
    name, recipe = draw(st.sampled_from(MODELS)), draw(st.sampled_from(FP8))
    tensor, pipeline = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))
    chunks = draw(st.sampled_from((1, 2))) if pipeline > 1 else 1
    layers = draw(st.integers(1, 3)) * pipeline * chunks
    parallel: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "sequence_parallel": tensor > 1 and draw(st.booleans())}
    parallel |= {"layers_per_chunk": layers // pipeline // chunks} if chunks > 1 else {}
    experts: dict[str, Any] = {}
    if name in ("deepseek-v2-lite", "qwen3-30b-a3b", "mixtral-8x7b"):
        parallel |= {"sequence_parallel": tensor > 1, "expert": draw(st.sampled_from((1, 2, 4)))}
        if tensor > 1 and draw(st.booleans()):
            parallel["expert_tensor"] = 1
        experts = {"dispatcher": draw(st.sampled_from(("alltoall", "allgather", "deepep"))), "overlapped": draw(st.booleans())}
    fields: dict[str, Any] = {"offload_ratio": draw(st.sampled_from((0.0, 0.0, "auto")))}
    if parallel["sequence_parallel"] and draw(st.booleans()):
        fields["overlap"] = {"userbuffers": True}
    cluster = "b200-180g" if recipe in ("mxfp8", "nvfp4") else "h100-80g"
    try:
        return job_of(name, cluster, layers=layers, recipe=recipe, experts=experts, parallel=parallel, **fields)
    except ValidationError:
        reject()


def accepted(job: Job, share: float) -> None:
    """`share`: of what stock holds that recomputes nothing, beyond what it holds that recomputes all. Whatever is planned is
    accepted as it is made, which checks it, and as it is finished."""
    costs = analytic_profile(job)
    least, most = (priced(job, costs, setting).most_bytes for setting in (FULL, NONE))
    budget = job.budget.model_copy(update={"memory_gib": (least + share * (most - least)) / GIB})
    try:
        plan = decide(job.model_copy(update={"budget": budget}), costs).plan
    except (ConfigError, Infeasible):
        return
    assert Plan.model_validate(plan.model_dump(mode="json")) == plan


def test_norms_that_reduce_an_amax_stay_on_demand() -> None:
    """A story: they were moved to the receive of the gradient, and `plan` ended in a traceback."""
    layout = {"tensor": 2, "pipeline": 4, "layers_per_chunk": 2, "sequence_parallel": True}
    accepted(job_of(recipe="nvfp4", layers=16, parallel=layout), 0.5)


def test_no_bytes_are_set_aside_for_weight_gradients_that_no_rule_delays() -> None:
    """A story: layers of one checkpoint delayed different ones, so that their rule delayed none, and the file was refused."""
    layout = {"tensor": 2, "pipeline": 4, "layers_per_chunk": 2, "sequence_parallel": True}
    accepted(job_of(recipe="nvfp4", layers=16, parallel=layout), 0.1)


def test_no_checkpoint_of_experts_resumes_in_an_exchange_beside_userbuffers() -> None:
    """A story: it did, and `advise` ended in a traceback."""
    layout = {"tensor": 2, "expert": 4, "expert_tensor": 1, "sequence_parallel": True}
    accepted(job_of("mixtral-8x7b", "h100-80g", parallel=layout, overlap={"userbuffers": True}), 0.1)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(jobs(), st.floats(0, 1))
def test_drawn_jobs_at_drawn_budgets(job: Job, share: float) -> None:
    accepted(job, share)
