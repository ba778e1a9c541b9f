"""What of Megatron's arguments does not go with a plan, before a model is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lynx.launch.launch import against_two_versions, arguments_against
from megatron_lynx.plan import Plan
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

PLAN = uniform_plan(tiny_job("llama", tensor=2, sequence_parallel=True))
AS_PLANNED = {
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "num_layers": PLAN.model.layers,
    "hidden_size": PLAN.model.hidden,
    "ffn_hidden_size": PLAN.model.ffn,
    "num_attention_heads": PLAN.model.heads,
    "seq_length": PLAN.model.seq,
    "micro_batch_size": PLAN.batch.micro,
    "transformer_impl": "local",
    "sequence_parallel": True,
}
OTHERS = {
    **{f"--{name.replace('_', '-')}": {name: 7} for name in AS_PLANNED if name not in ("transformer_impl", "sequence_parallel")},
    "--transformer-impl": {"transformer_impl": "transformer_engine"},
    "--sequence-parallel": {"sequence_parallel": False},
    "--tp-comm-overlap": {"tp_comm_overlap": True},
    "--num-virtual-stages-per-pipeline-rank": {"virtual_pipeline_model_parallel_size": 2},
    "--recompute-granularity": {"recompute_granularity": "full"},
    "--lynx-schedule": {"lynx_schedule": "double-buffered"},
}


def places(plan: Plan, **given: Any) -> list[str]:
    return [problem.where for problem in arguments_against(plan, SimpleNamespace(**given))]


@pytest.mark.parametrize("flag", OTHERS)
def test_an_argument_that_is_not_the_plans_is_named(flag: str) -> None:
    assert places(PLAN, **AS_PLANNED) == []
    assert places(PLAN, **AS_PLANNED | OTHERS[flag]) == [flag]


def test_weights_that_are_held_in_fp8_are_the_plans() -> None:
    plan = PLAN.model_copy(update={"model": PLAN.model.model_copy(update={"fp8": "mxfp8"})})
    fp8 = {**AS_PLANNED, "fp8": "e4m3", "fp8_recipe": "mxfp8"}
    assert places(plan, **fp8) == []
    assert places(plan, **fp8, fp8_param_gather=True) == ["--fp8-param-gather"]
    assert places(PLAN, **fp8) == ["--fp8-recipe"]


def test_one_tensor_rank_has_no_sequence_parallelism() -> None:
    """Megatron switches it off there, and validates it later than we look."""
    alone = uniform_plan(tiny_job("llama"))
    assert places(alone, **AS_PLANNED | {"tensor_model_parallel_size": 1}) == []


def test_steps_cannot_be_checked_without_flushes() -> None:
    """Gradients are not complete when a step ends; frames can be checked."""
    plan = PLAN.model_copy(update={"schedule": "double_buffered"})
    unflushed = {**AS_PLANNED, "lynx_schedule": "double-buffered"}
    assert places(plan, **unflushed, lynx_check=2) == ["--lynx-check"]
    assert places(plan, **unflushed, lynx_check="frames") == places(PLAN, **AS_PLANNED, lynx_check=2) == []


def test_shards_of_weights_that_are_tensor_ranks_train_without_flushes() -> None:
    """Megatron 0.19 resolves --tensor-parallel-num-weight-shards to the tensor-parallel size, and such launches were refused."""
    sizes = {"pipeline_model_parallel_size": 2, "global_batch_size": 4, "micro_batch_size": 1, "data_parallel_size": 1}
    args = SimpleNamespace(**sizes, tensor_parallel_num_weight_shards=2, gtp_weight_remat_size=1)
    assert list(against_two_versions(args)) == []
    args.gtp_weight_remat_size = 2
    assert [problem.where for problem in against_two_versions(args)] == ["--tensor-parallel-num-weight-shards"]
