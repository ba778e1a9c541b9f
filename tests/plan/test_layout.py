"""Real megatron-core reads what we tell the launch, and gives every rank exactly the plan's layers."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from yaml import safe_load

from megatron_lynx.plan.layout import launch_flags, layer_flags, layout_text
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.plan_file import dump_plan
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

FIELDS = {
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}


def plan_of(counts: tuple[int, ...], pipeline: int):
    job = tiny_job(layers=sum(counts), pipeline=1, microbatches=2 * pipeline)
    parallel = job.parallel.model_copy(update={"pipeline": pipeline, "partition": counts})
    return uniform_plan(job.model_copy(update={"parallel": parallel, "gpus": pipeline}), "none")


def layers_in_megatron(plan) -> list[range]:
    """Those of every virtual stage, by the functions that megatron-core builds its blocks with."""
    flags = dict(shlex.split(flag) for flag in layer_flags(plan))
    pipeline, chunks = plan.parallel.pipeline, plan.parallel.chunks
    fields = {FIELDS[name]: int(value) for name, value in flags.items() if name in FIELDS}
    each = flags.get("--num-layers-per-virtual-pipeline-stage")
    if each is not None:
        fields["virtual_pipeline_model_parallel_size"] = plan.model.layers // pipeline // int(each)
    config = TransformerConfig(
        num_layers=plan.model.layers,
        hidden_size=32,
        num_attention_heads=4,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=None if pipeline == 1 else "bf16",
        pipeline_model_parallel_layout=flags.get("--pipeline-model-parallel-layout"),
        **fields,
    )
    found = []
    for chunk in range(chunks):
        for stage in range(pipeline):
            place = {"vp_stage": None if chunks == 1 else chunk, "pp_rank": stage}
            if config.pipeline_model_parallel_layout is not None:
                layers = config.pipeline_model_parallel_layout.get_layer_id_list(**place)
                found.append(range(layers[0] + 1, layers[-1] + 2) if layers else range(0))
            else:
                first = get_transformer_layer_offset(config, **place) + 1
                found.append(range(first, first + get_num_layers_to_build(config, **place)))
    return found


@pytest.mark.parametrize(
    ("counts", "pipeline", "flags"),
    [
        ((4,), 1, ()),
        ((4, 4, 4), 3, ()),
        ((3, 5), 2, ("--decoder-first-pipeline-num-layers 3", "--decoder-last-pipeline-num-layers 5")),
        ((4, 4, 4, 2), 4, ("--decoder-last-pipeline-num-layers 2",)),
        ((3, 4, 4, 2), 4, ("--decoder-first-pipeline-num-layers 3", "--decoder-last-pipeline-num-layers 2")),
        ((3, 4, 5, 2), 4, ("--pipeline-model-parallel-layout 'Et*3|t*4|t*5|t*2L'",)),
        ((2,) * 6, 2, ("--num-layers-per-virtual-pipeline-stage 2",)),
        ((0, 2, 2), 3, ("--pipeline-model-parallel-layout 'E|t*2|t*2L'",)),
        ((1, 2, 1, 0), 2, ("--pipeline-model-parallel-layout 'Et|t*2|t|L'",)),
        ((1, 2, 2, 2, 2, 1), 2, ("--pipeline-model-parallel-layout 'Et|(t*2|)*4tL'",)),
    ],
)
def test_a_launch_gives_every_rank_the_plans_layers(counts, pipeline, flags, monkeypatch):
    plan = plan_of(counts, pipeline)
    assert layer_flags(plan) == flags
    chunks = plan.parallel.chunks
    monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: chunks if chunks > 1 else None)
    assert layers_in_megatron(plan) == [range(stage.layers.first, stage.layers.last + 1) for stage in plan.stages]
    assert Plan.model_validate(safe_load(dump_plan(plan))) == plan


def test_a_chunk_without_layers_has_no_letter():
    assert layout_text([0, 1, 2, 0]) == "E|t|t*2|L"


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(1, 30), min_size=2, max_size=8))
def test_any_layout_is_read_as_it_is_meant(chunks, stages):
    counts = stages * chunks
    layout = PipelineParallelLayerLayout(layout_text(counts), len(stages))
    layout.validate_layer_layout(sum(counts), None)
    found = [
        sum(kind.name == "decoder" for kind in layout.layout[stage][chunk])
        for chunk in range(chunks)
        for stage in range(len(stages))
    ]
    assert found == counts


def test_flags_name_the_layout_and_the_micro_batch():
    plan = uniform_plan(tiny_job(tensor=2, pipeline=2, sequence_parallel=True, micro=2))
    assert " ".join(launch_flags(plan)) == (
        "--num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --micro-batch-size 2"
    )


def test_a_launch_is_told_the_size_of_groups() -> None:
    jobs = [tiny_job(pipeline=2, layers_per_chunk=1, microbatches=4, microbatch_group=group) for group in (None, 2, 4)]
    said = ["--microbatch-group-size-per-virtual-pipeline-stage 4" in launch_flags(uniform_plan(job, "none")) for job in jobs]
    assert said == [False, False, True]
