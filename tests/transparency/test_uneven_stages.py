"""Stages that do not own equally many layers, in each way in which a launch can say so: Megatron is given its own fields."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.launch_arguments import read_launch
from megatron_lynx.plan.plan_file import dump_plan
from megatron_lynx.planner import make_plan
from megatron_lynx.testbed.ranks import RankPool
from tests.long import with_models
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job
from tests.transparency.offloaded import offloading
from tests.transparency.test_every_bit import checked
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

LAUNCH = (
    "--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --vocab-size 64 "
    "--micro-batch-size 2 --global-batch-size 8 --transformer-impl local --pipeline-model-parallel-size 2"
)
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"

WAYS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "first": ("--num-layers 4 --decoder-first-pipeline-num-layers 1", {FIRST: 1}, (1, 3)),
    "last": ("--num-layers 4 --decoder-last-pipeline-num-layers 1", {LAST: 1}, (3, 1)),
    "embedding": ("--num-layers 3 --account-for-embedding-in-pipeline-split", {EMBEDDING: True}, (1, 2)),
    "embedding, a chunk of it alone": (
        f"--num-layers 3 --account-for-embedding-in-pipeline-split {CHUNKS}",
        {EMBEDDING: True},
        (0, 1, 1, 1),
    ),
    "loss, two chunks": (f"--num-layers 7 --account-for-loss-in-pipeline-split {CHUNKS}", {LOSS: True}, (2, 2, 2, 1)),
}
"""What a launch says, the fields that Megatron makes of it, and the layers of each virtual stage."""


@pytest.mark.parametrize("way", WAYS)
def test_the_layers_are_those_that_megatron_gives_each_stage(pool_of: Callable[[int], RankPool], way: str) -> None:
    words, fields, partition = WAYS[way]
    reading = read_launch(shlex.split(f"{LAUNCH} {words}"), gpus=2)
    assert reading.problems == ()
    assert reading.job_data["parallel"]["partition"] == list(partition)
    job = tiny_job(layers=sum(partition), pipeline=2, partition=partition, microbatches=4)
    profile = made_up_profile(job)
    trial = Trial(model={"pipeline_model_parallel_layout": None, **fields}, steps=1)
    checked(pool_of, job, [make_plan(job, profile), uniform_plan(job)], trial)


EMPTY: dict[str, tuple[str, dict[str, Any]]] = {
    "the embedding and the loss alone": ("E|tt|t|L", {"partition": (0, 2, 1, 0)}),
    "nothing": ("Et||tt|tL", {"partition": (1, 0, 2, 1)}),
    "a stage without layers": ("E|t*3L", {"partition": (0, 3)}),
}
"""Chunks without layers: the layout of a launch, and what a job says."""


@with_models(EMPTY)
def test_chunks_without_layers(pool_of: Callable[[int], RankPool], layout: str, like: Any) -> None:
    text, fields = EMPTY[layout]
    words = f"--num-layers {sum(fields['partition'])} --pipeline-model-parallel-layout {shlex.quote(text)}"
    assert read_launch(shlex.split(f"{LAUNCH} {words}"), gpus=2).job_data["parallel"]["partition"] == list(fields["partition"])
    job = tiny_job(like, layers=sum(fields["partition"]), pipeline=2, microbatches=4, **fields)
    plans = [make_plan(job, made_up_profile(job)), uniform_plan(job), offloading(uniform_plan(job, "none"), 8_000)]
    checked(pool_of, job, plans, Trial(steps=1))


def test_chunks_without_layers_beside_tensor_parallel_windows(pool_of: Callable[[int], RankPool]) -> None:
    """The forward before a backward may be that of a chunk without layers, so no recomputation counts on a forward's windows."""
    layout = {"tensor": 2, "sequence_parallel": True, "pipeline": 2, "partition": (0, 2, 2, 0)}
    job = tiny_job(layers=4, microbatches=4, **layout)
    plans = [make_plan(job, made_up_profile(job)), uniform_plan(job, gather="once")]
    assert not any("fwd." in dump_plan(plan).split("stages:")[1] for plan in plans)
    checked(pool_of, job, plans, Trial(steps=1))
