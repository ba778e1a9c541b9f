"""A rank that runs out of device memory says when it was, what was planned, what is held, and what would fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_lynx.launch.out_of_memory import (
    Allocator,
    Rank,
    budget_bytes,
    command,
    explained,
    moment_of,
    rounded_down,
    states_held,
)
from megatron_lynx.planner import decide
from megatron_lynx.runtime.order import Whereabouts, note
from megatron_lynx.units import GIB, KIB, MIB, format_bytes
from tests.instruments.script_device import MEMORY_BYTES, LimitedMemory, out_of_memory
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..profiler.made_up import made_up_profile
from .launched import MODEL, SIZE, flags_of, saved
from .memory_on_ranks import said_at

MUCH_VOCABULARY = tiny_job("gpt", layers=2, hidden=32, ffn=64, seq=32, vocab=2048, tied_embeddings=False)
OR_LOSS, OR_HEAD = "the forward or the loss", "the backward of the loss, the head or layers that the plan leaves alone,"
UPDATE = "an update"
LONG_SEQUENCES = tiny_job("gpt", hidden=64, ffn=256, seq=64, vocab=64)

ON_CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB of which 1.05 GiB is free. "
    "Including non-PyTorch memory, this process has 78.06 GiB memory in use. Of the allocated memory 70.50 GiB is allocated by "
    "PyTorch, with 12.00 MiB allocated in private pools (e.g., CUDA Graphs), and {unused} is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation.  See documentation for Memory Management"
)


@pytest.mark.parametrize(
    ("job", "limits"),
    [
        (MUCH_VOCABULARY, {140_000: "the forward", 320_000: OR_LOSS, 740_000: OR_HEAD, 1_200_000: UPDATE}),
        (LONG_SEQUENCES, {900_000: "the forward", 1_060_000: "a recomputation", 1_500_000: UPDATE, 2_100_000: None}),
    ],
    ids=["much vocabulary", "long sequences"],
)
def test_the_moment_at_which_a_limit_is_met_is_named(own_pool_of, job, limits):
    """The more memory there is, the later in the step."""
    (said,) = own_pool_of(1).run(said_at, job, uniform_plan(job), list(limits))
    assert [words and words.partition(" of micro-batch")[0] for words, _ in said] == list(limits.values())
    for name, (_, text) in zip(limits.values(), said, strict=True):
        where = text.partition("\n")[2]
        if name not in (None, UPDATE):
            assert "micro-batch 0" in where
        if name in ("the forward", "a recomputation"):
            assert "layer " in where
            assert " half: found " in where
        if name is not None:
            assert "planned: nothing: the plan does not say what a device of this stage holds" in text
            assert "held: " in text
            assert "parameters " in text
            assert "nearest change that fits: megatron-lynx plan --memory-gib 0.00" in text


def test_what_the_allocator_says_is_read():
    allocator = Allocator.of(torch.OutOfMemoryError(ON_CUDA.format(unused="1.25 GiB")))
    assert allocator == Allocator(2 * GIB, round(70.5 * GIB), round(1.25 * GIB), round(1.05 * GIB))
    assert allocator.limit_bytes == round(70.5 * GIB) + round(1.25 * GIB) + round(1.05 * GIB)
    assert allocator.lacking_bytes == 0, "fragmentation alone"
    short = Allocator.of(torch.OutOfMemoryError(ON_CUDA.format(unused="512.00 MiB")))
    assert short is not None
    assert short.lacking_bytes == pytest.approx(0.45 * GIB, abs=1)
    assert Allocator.of(torch.OutOfMemoryError("NCCL has no more memory")) is None


def test_the_stand_in_says_what_the_allocator_says():
    read = Allocator.of(torch.OutOfMemoryError(out_of_memory(3 * KIB, 20 * MIB, 18 * MIB, MIB)))
    assert read == Allocator(3 * KIB, 18 * MIB, MIB, MIB)


def test_a_command_that_would_fit():
    fragmented, short = Allocator(2 * GIB, 70 * GIB, 2 * GIB, GIB), Allocator(4 * GIB, 70 * GIB, 0, GIB)
    plan = ("plan.yaml", "jobs/gpt-22b")
    assert command(fragmented, 71 * GIB, *plan, {}) == "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    others = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    found = command(fragmented, 71 * GIB, *plan, others)
    assert found == "export PYTORCH_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True"
    growing = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert command(fragmented, None, *plan, growing).startswith("megatron-lynx plan --memory-gib 71 -o plan.yaml ")
    assert budget_bytes(short, 72 * GIB) == 69 * GIB, "71 GiB are there, and this moment takes 2 GiB more than planned"
    assert command(short, 72 * GIB, *plan, {}) == "megatron-lynx plan --memory-gib 69 -o plan.yaml jobs/gpt-22b"
    assert budget_bytes(short, 80 * GIB) == 71 * GIB, "the plan is for a larger device"
    assert [rounded_down(gib) for gib in (70.129, 0.00234567, 5.0, 0)] == ["70.12", "0.002345", "5", "0"]


def test_what_was_planned_is_said_by_kind():
    decision = decide(MUCH_VOCABULARY, made_up_profile(MUCH_VOCABULARY, 1e-5))
    predicted = decision.plan.stages[0].predicted
    held = predicted.held_at(decision.memory[0].moment)
    assert held is not None
    assert sum(held.values()) == predicted.memory_bytes == decision.memory[0].total
    error = torch.OutOfMemoryError(ON_CUDA.format(unused="512.00 MiB"))
    said = str(explained(error, Rank(decision.plan, 0), "in step 1 of this run", "plan.yaml"))
    assert "stage 0, outside of passes and updates: found 70.50 GiB allocated and 2.00 GiB asked for, of 72.05 GiB" in said
    assert f"planned: {format_bytes(predicted.memory_bytes)} at the stage's fullest" in said
    assert explained(ValueError("another"), Rank(decision.plan, 0), "", "") is None


TWO_STAGES = tiny_job("gpt", pipeline=2, microbatches=4, vocab=2048)


def test_what_was_planned_is_that_of_the_own_stage():
    """Every stage once was told what the first one should hold."""
    plan = decide(TWO_STAGES, made_up_profile(TWO_STAGES, 1e-5)).plan
    first, last = (format_bytes(stage.predicted.memory_bytes) for stage in plan.stages)
    assert first != last
    for stage, planned in enumerate((first, last)):
        error = torch.OutOfMemoryError(ON_CUDA.format(unused="512.00 MiB"))
        said = str(explained(error, Rank(plan, stage), "in step 1 of this run", "plan.yaml"))
        assert f"planned: {planned} at the stage's fullest" in said


IN_CHUNKS = tiny_job("gpt", pipeline=2, layers_per_chunk=1, microbatches=4)


@pytest.mark.parametrize(
    ("job", "stage", "chunk", "half", "embedding"),
    [
        (TWO_STAGES, 0, 0, (1, "attention"), True),
        (TWO_STAGES, 0, 0, (2, "attention"), False),
        (TWO_STAGES, 0, 0, (1, "mlp"), False),
        (TWO_STAGES, 1, 0, (3, "attention"), False),
        (IN_CHUNKS, 0, 0, (1, "attention"), True),
        (IN_CHUNKS, 0, 1, (3, "attention"), False),
    ],
    ids=[
        "first half of all",
        "another layer",
        "another half",
        "first half of the last stage",
        "of all chunks",
        "of another chunk",
    ],
)
def test_only_behind_the_models_first_half_comes_the_embeddings_backward(job, stage, chunk, half, embedding):
    moment = moment_at(Whereabouts("backward", 0, chunk, half), Rank(uniform_plan(job), stage))
    assert ("embedding" in moment.words) == embedding
    assert moment.planned == (("backward", "embedding_backward") if embedding else ("backward",))


def moment_at(where, rank):
    error = torch.OutOfMemoryError(ON_CUDA.format(unused="512.00 MiB"))
    note(error, where)
    moment = moment_of(error, rank)
    assert moment is not None
    return moment


@pytest.mark.parametrize(("stage", "chunk", "name"), [(0, 0, "forward"), (0, 1, "forward"), (1, 0, "forward"), (1, 1, "loss")])
def test_the_loss_is_behind_the_last_chunk_of_the_last_stage(stage, chunk, name):
    rank = Rank(uniform_plan(IN_CHUNKS), stage)
    assert moment_at(Whereabouts("forward", 0, chunk), rank).planned[-1] == name
    backward = ("backward",) if name == "forward" else ("backward", "head_backward", "loss")
    assert moment_at(Whereabouts("backward", 0, chunk), rank).planned == backward


def test_what_an_optimizer_has_on_the_host_is_not_held_on_the_device():
    """Megatron's optimizer that is on the host in part has states of both sides in one mapping."""
    model = torch.nn.Linear(8, 8, bias=False, device="meta")
    optimizer = SimpleNamespace(param_groups=[], state={model.weight: {"exp_avg": torch.zeros(64)}})
    assert states_held([model], optimizer) == {"parameters": 256}
    there = SimpleNamespace(param_groups=[], state={0: {"exp_avg": torch.zeros(64)}})
    assert states_held([torch.nn.Linear(8, 8, bias=False)], there) == {"parameters": 256, "optimizer": 256}


def test_the_load_of_experts_is_said_where_it_is_more_than_planned():
    plan = uniform_plan(LONG_SEQUENCES)
    more = "experts: found 1.52 of a balanced share of tokens on this rank, in this step, needed 1.00"
    for load, words in ((1.0, ""), (1.52, more)):
        error = torch.OutOfMemoryError(ON_CUDA.format(unused="512.00 MiB"))
        note(error, Whereabouts("forward", 0, expert_load=load))
        said = str(explained(error, Rank(plan, 0), "in step 1 of this run", "plan.yaml"))
        assert ("experts: " in said) == bool(words)
        assert words in said


def test_an_error_that_was_raised_from_one_of_memory():
    """Copies to the host, say, wrap what goes wrong with them."""
    plan = uniform_plan(MUCH_VOCABULARY)
    try:
        try:
            raise torch.OutOfMemoryError(ON_CUDA.format(unused="0 bytes"))
        except torch.OutOfMemoryError as error:
            raise RuntimeError("a copy failed") from error
    except RuntimeError as error:
        found = explained(error, Rank(plan, 0), "in step 2 of this run", "plan.yaml")
    assert found is not None
    assert found.headline == "out of device memory in step 2 of this run"


def test_a_limit_holds_in_backward_too():
    with LimitedMemory(2**62):
        given = torch.ones(1000, requires_grad=True)
        made = given.exp().exp().sum()
    with LimitedMemory(0), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        made.backward()


def test_one_rank_speaks_and_all_end(run, tmp_path):
    """Both stages run out of memory, or one ends because the other is gone."""
    job = tiny_job("gpt", pipeline=2, microbatches=4, **SIZE)
    plan = saved(decide(job, made_up_profile(job, 1e-5)).plan, tmp_path / "plan.yaml")
    flags = [*MODEL, *flags_of("pipeline 2"), "--train-iters", "2", "--lynx-plan", plan]
    ended = run(Path(__file__).with_name("pretrain_tiny.py"), flags, ranks=2, env={MEMORY_BYTES: "2300000"})
    assert ended.status == 1
    full = [line for line in ended.ours if line.startswith("  - nearest change that fits: megatron-lynx plan --memory-gib ")]
    assert len(full) == 1, ended.text
    assert "out of device memory in step 1 of this run" in ended.text
    assert "of micro-batch " in ended.text
    assert " at this moment, as planned" in ended.text
    assert "/megatron_lynx/" not in ended.text, "no traceback of ours"
