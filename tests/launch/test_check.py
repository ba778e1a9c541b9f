"""`--lynx-check`, launched: it passes and changes nothing, it finds what is wrong, and it says what it cannot tell.

`test_wheel` has the run that is checked, traced, saved and resumed; `test_checked_steps` the parts.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from megatron_lynx.config.job import Head
from tests.deferring import deferring
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..transparency.checkpoints import checkpointed
from ..transparency.plans import plan_for
from .launched import MODEL, SIZE, saved

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def faulty(run, tmp_path_factory):
    """`faulty(fault, stages)`: a checked launch in which something goes wrong."""

    def launched(fault, stages, *flags):
        layout = {"pipeline": stages} if stages > 1 else {}
        plan = uniform_plan(tiny_job("gpt", **layout, microbatches=4, **SIZE))
        path = saved(plan, tmp_path_factory.mktemp("check") / "plan.yaml")
        arguments = [*MODEL, "--pipeline-model-parallel-size", str(stages), "--train-iters", "3", "--lynx-plan", path, *flags]
        env = {"FAULT": fault, "RANK_OF_FAULT": str(stages - 1)}
        return run(HERE / "pretrain_faulty.py", arguments, ranks=stages, env=env)

    return launched


@pytest.mark.long
def test_reduced_while_backward_runs(run, tmp_path):
    """Two replicas of two stages with two chunks, distributed optimizer, weight gradients fused and deferred: steps go
    on from buckets, gathered parameters and flags as they would be without the check."""
    layout = {"pipeline": 2, "layers_per_chunk": 1, "microbatches": 4}
    flags = [flag for flag in MODEL if flag != "--no-gradient-accumulation-fusion"]
    flags += ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1", "--global-batch-size", "16"]
    flags += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--no-align-grad-reduce"]
    plan = saved(deferring(uniform_plan(tiny_job("gpt", **layout, **SIZE))), tmp_path / "plan.yaml")
    launched = partial(run, HERE / "pretrain_faulty.py", ranks=4, env={"FAULT": "none"})
    stock = launched(flags)
    checked = launched([*flags, "--lynx-plan", plan, "--lynx-check", "3"])
    assert (stock.status, checked.status) == (0, 0), checked.text
    assert checked.ours[1].startswith("megatron-lynx: checked 3 steps against stock without recomputation: in each, 8 losses ")
    assert re.search("; deferred [1-9][0-9]* weight gradients: [1-9][0-9]* ran in waits, 0 were flushed", checked.ours[-1])
    assert len(stock.iterations) == 5
    assert checked.iterations == stock.iterations


def test_a_head_in_pieces_is_checked_to_a_tolerance_and_all_else_to_the_bit(run, tmp_path):
    job = tiny_job("gpt", microbatches=4, **SIZE)
    plan = uniform_plan(job.model_copy(update={"head": Head(pieces=4)}))
    flags = [*MODEL, "--train-iters", "2", "--lynx-plan", saved(plan, tmp_path / "plan.yaml"), "--lynx-check", "2"]
    checked = run(HERE / "pretrain_tiny.py", flags)
    assert checked.status == 0, checked.text
    _, warned, summary = checked.ours[:3]
    assert warned.startswith("megatron-lynx: inexact: the head runs in 4 pieces")
    assert summary.startswith("megatron-lynx: checked 2 steps against stock without recomputation: in each, 4 losses ")
    near = "but for embedding.word_embeddings.weight: within 2e-05 of its largest value, as the plan's head is in pieces"
    assert summary.endswith(f" are equal in every bit, {near}")


def test_a_broken_recomputation_is_named(faulty):
    """The output that attention's projection saw is the first thing that the wrong queries and keys change."""
    broken = faulty("recompute", 2, "--lynx-check", "2")
    assert broken.status == 1
    _, headline, problem = broken.ours
    assert headline.startswith(
        "megatron-lynx: --lynx-check: in step 1 the plan and stock without recomputation differ in 32 places"
    )
    assert problem.startswith("  - decoder.layers.2.self_attention.linear_proj.weight on stage 1 (rank 1): found 409")
    assert broken.iterations == []
    assert "/megatron_lynx/" not in broken.text, "no traceback of ours"


def test_stock_that_differs_from_itself(faulty):
    restless = faulty("stock", 1, "--lynx-check", "2")
    assert restless.status == 1
    _, headline, problem = restless.ours
    assert headline.endswith("in step 1 stock without recomputation differs from itself when it runs twice")
    assert all(setting in problem for setting in ("--deterministic-mode", "NCCL_ALGO=Ring", "CUBLAS_WORKSPACE_CONFIG=:4096:8"))


def test_stock_with_full_recomputation_fits_where_stock_without_does_not(faulty):
    """More steps than there are is all of them."""
    checked = faulty("oom", 1, "--lynx-check", "9", "--lynx-check-against", "full")
    assert checked.status == 0, checked.text
    _, summary, done = checked.ours
    assert summary.startswith("megatron-lynx: checked 3 steps against stock with full recomputation: in each, 4 losses and")
    # 3 steps x 4 micro-batches x 4 layers x 2 halves
    assert done.startswith("megatron-lynx: rank 0 recomputed 96 ")


def test_one_rank_without_memory_ends_all(faulty):
    """Others wait for it in a collective, where they cannot be asked to begin again. Only the one that knows why speaks."""
    ended = faulty("oom", 2, "--lynx-check", "1")
    assert ended.status == 1
    assert ended.iterations == []
    assert ended.ours[1:] == [
        "megatron-lynx: rank 1: the plan cannot be checked like this",
        "  - --lynx-check: stock without recomputation ran out of device memory in step 1 (Tried to allocate 2.00 GiB. GPU 0 has "
        "a total capacity of 79.11 GiB of which 1.05 GiB is free); give --lynx-check-against full: its bits are the same",
    ]
    assert "/megatron_lynx/" not in ended.text, "no traceback of ours"


def test_a_plan_with_checkpoints_says_so_and_its_frames_are_checked(run, tmp_path):
    plan = checkpointed(plan_for(tiny_job("gpt", microbatches=4, **SIZE), lambda layer: ()), "layer")
    flags = [*MODEL, "--train-iters", "2", "--lynx-plan", saved(plan, tmp_path / "plan.yaml"), "--lynx-check", "frames:2"]
    checked = run(HERE / "pretrain_tiny.py", flags)
    assert checked.status == 0, checked.text
    said = f"checkpointed layers: {plan.stages[0].layers} (layer); all inside runs again, with what it communicates"
    assert checked.ours[1] == f"megatron-lynx: {said}"
    assert re.search("recomputed [1-9][0-9]* layer halves: 0 inside windows", checked.ours[-1]), checked.ours
