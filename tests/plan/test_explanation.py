"""What a plan does, in words: nothing that matters is left out, nothing is said twice."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from megatron_lynx.plan.explanation import explanation
from megatron_lynx.plan.plan import Offload, Plan
from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.tiny_jobs import tiny_job


def shown(plan: Plan) -> str:
    page = StringIO()
    Console(width=200, file=page).print(explanation(plan))
    return page.getvalue()


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
