"""What a plan does, in words: nothing that matters is left out, nothing is said twice."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from megatron_lynx.config import Experts
from megatron_lynx.config.loader import bundled_configs
from megatron_lynx.plan import load_plan
from megatron_lynx.plan.explanation import explanation, summary
from megatron_lynx.plan.plan import Head, Offload, Plan
from megatron_lynx.plan.rule import CheckpointGroups
from megatron_lynx.units import GIB
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import checkpointed, with_rest_in_wait, without_copies
from tests.uniform import uniform_plan


def shown(plan: Plan) -> str:
    page = StringIO()
    Console(width=200, file=page).print(explanation(plan))
    return page.getvalue()


@pytest.mark.parametrize("name", ["llama-7b-a100-80g", "gpt-175b-h800-80g", "llama3-70b-256k-h800-80g", "deepseek-v3-h100-80g"])
def test_a_plan_of_any_size_is_explained_on_one_screen(name: str) -> None:
    """They took 62 to over 1,400 lines."""
    plan, page = load_plan(bundled_configs() / "plans" / f"{name}.yaml"), StringIO()
    Console(width=80, file=page).print(summary(plan))
    lines = page.getvalue().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    text = " ".join(page.getvalue().split())
    assert f"--pipeline-model-parallel-size {plan.parallel.pipeline}" in text
    assert f"{max(stage.predicted.memory_bytes or 0 for stage in plan.stages[:1]) / GIB:.2f}" in text
    assert "Layer by layer: --all" in text


def test_a_summary_counts_the_layers_of_each_treatment() -> None:
    plan = uniform_plan(tiny_job("llama", pipeline=2), windows=False)
    (rule,) = plan.stages[0].rules
    assert rule.recompute
    page = StringIO()
    Console(width=200, file=page).print(summary(plan))
    row = next(line for line in page.getvalue().splitlines() if line.startswith("0"))
    assert row.split()[:5] == ["0-1", "2", "recomputed", "in", "all:"]


def test_chunks_treated_alike_share_a_table() -> None:
    plan = uniform_plan(tiny_job("llama", pipeline=2, layers_per_chunk=1, microbatches=4), windows=False)
    text = shown(plan)
    assert text.count("core_attention") == 2
    assert "stage 0, chunks 0-1, each: layers 1, 3" in text
    assert "stage 1, chunks 0-1, each: layers 2, 4" in text


def test_a_chunk_of_its_own_has_its_own() -> None:
    plan = uniform_plan(tiny_job("llama", pipeline=2, layers_per_chunk=1, microbatches=4), windows=False)
    *others, last = plan.stages
    text = shown(plan.model_copy(update={"stages": (*others, last.model_copy(update={"offload": Offload(bytes=1 << 20)}))}))
    assert "stage 1, chunk 0: layers 2" in text
    assert "stage 1, chunk 1: layers 4" in text
    assert text.count("to the host: 1.00 MiB of every micro-batch") == 1


def test_a_pace_is_explained() -> None:
    plan = uniform_plan(tiny_job("llama"), windows=False)
    (stage,) = plan.stages
    for which, said in (("at_once", "where a micro-batch's own backward follows at once"), ("all", "within its own backward")):
        offload = Offload(bytes=1 << 20, pace_bytes=1 << 19, half_by_half=which)  # type: ignore[arg-type]
        text = shown(plan.model_copy(update={"stages": (stage.model_copy(update={"offload": offload}),)}))
        assert "it goes half by half, 512.00 KiB beside one half's forward" in text
        assert said in text


def test_inputs_of_checkpoints_that_go_to_the_host_are_explained() -> None:
    plan = checkpointed(uniform_plan(tiny_job("llama"), windows=False), CheckpointGroups(layers=2).model_dump())
    (stage,) = plan.stages
    text = shown(plan.with_stages([stage.model_copy(update={"offload": Offload(bytes=1 << 20)})]))
    assert "the input of every 2 layers, to the host" in text
    assert "of every micro-batch, what forward made first, inputs of checkpoints among it; tensors" in text
    assert "to the host" not in shown(plan)


def test_where_a_checkpoint_goes_on_is_explained() -> None:
    job = tiny_job("llama", tensor=2, sequence_parallel=True)
    plan = checkpointed(uniform_plan(job, windows=False), "layer")
    said = "then bwd.mlp.0: what comes behind all that communicates"
    assert shown(with_rest_in_wait(plan)).count(said) == 1
    assert said not in shown(plan)


def test_copies_in_fp8_beside_checkpoints_are_explained() -> None:
    job = tiny_job("llama", implementation="transformer_engine", dtype="bf16", fp8={"recipe": "delayed"})
    kept = checkpointed(uniform_plan(job, windows=False), "layer")
    copy = "and the copy that its last linear has of what it reads"
    assert copy in " ".join(shown(kept).split())
    assert copy not in " ".join(shown(without_copies(kept)).split())


def test_the_largest_load_of_experts_is_said_where_twice_the_assumed_one_does_not_fit() -> None:
    experts = Experts(count=4, per_token=2, ffn=64)
    plan = uniform_plan(tiny_job("llama", pipeline=2, layers=4, microbatches=4, experts=experts))
    assert "balanced share" not in shown(plan)
    loads = {0: 0.0, 1: 1.43}
    stages = tuple(
        stage.model_copy(update={"predicted": stage.predicted.model_copy(update={"moe_load": loads[stage.stage]})})
        for stage in plan.stages
    )
    text = shown(plan.model_copy(update={"stages": stages}))
    said = "at most 1.43 times a balanced share for the experts of one rank (stage 1): the plan is made for 1, and twice that"
    assert said in text
    assert "beyond that a device may run out of memory: plan for more with model.experts.holds" in text
    alone = stages[1].predicted.model_copy(update={"moe_load_fallen_back": 2.6})
    text = shown(
        plan.model_copy(update={"stages": (stages[0], stages[1].model_copy(update={"predicted": alone, "experts_hold": 1.43}))})
    )
    assert "beyond that experts run again what they make of their rows, which holds to 2.6 times: plan for more" in text


def test_what_nobody_looks_into_is_said() -> None:
    opaque = [{"kind": "own_attention", "layers": [1, "3-4"]}, {"kind": "no_mlp", "layers": [3]}]
    text = shown(uniform_plan(tiny_job("llama", opaque=opaque)))
    assert "kept whole: own_attention in layers 1, 3-4: nobody looks into it" in text
    assert "kept whole: no_mlp" not in text


def test_a_head_in_pieces_is_said_to_be_inexact() -> None:
    plan = uniform_plan(tiny_job("llama"), windows=False)
    text = shown(plan.model_copy(update={"head": Head(pieces=4)}))
    assert "head    in 4 pieces: logits of 4 tokens of each sequence at a time, computed twice" in text
    assert "inexact: its weight's gradient is summed in another order than stock's; all else is stock's" in text
    assert "inexact" not in shown(plan)
