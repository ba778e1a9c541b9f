"""Captured graphs on the real `pretrain_gpt.py` of a checkout (MEGATRON_LM_DIR): its training loop captures behind its first
step, and what is printed under plans beside the graphs is what stock prints with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from .checkouts import minor_of, te_for, under_plans
from .launched import GROUPED, LAYOUTS, MODEL, SIZE, TE, WITH_EXPERTS

RAN = re.compile(r"^(\d+) graphs ran (\d+) times$", re.MULTILINE)
SP2, PP2, EP2 = "tensor 2, sequence parallel", "pipeline 2", "expert 2"


@pytest.mark.parametrize(
    ("layout", "captured"), [(SP2, ("attn",)), (PP2, ("mlp",)), (EP2, ("attn", "moe_router", "moe_preprocess"))]
)
def test_every_printed_digit_is_stocks(script: Path, layout: str, captured: tuple[str, ...], tmp_path: Path) -> None:
    """Of five steps one is before the capture; two are checked, the second of them with graphs."""
    named = "--cuda-graph-scope" if minor_of(script.parent) in ("16", "17") else "--cuda-graph-modules"
    flags = [*MODEL, *TE, "--mock-data", "--bf16", *(GROUPED if layout == EP2 else [])]
    flags += ["--cuda-graph-impl", "transformer_engine", named, *captured, "--cuda-graph-warmup-steps", "1", "--te-rng-tracker"]
    fields = {**LAYOUTS[layout], **SIZE, **(WITH_EXPERTS if layout == EP2 else {}), "dtype": "bf16", "captured": captured}
    job = tiny_job("gpt", **fields, implementation="transformer_engine")
    plans = [uniform_plan(job, gather="once")]
    wrapper, path = Path(__file__).with_name("pretrain_graphs.py"), [script.parent, te_for(script)]
    for planned, _ in under_plans(wrapper, flags, layout, plans, tmp_path, path=path, env={"SCRIPT": str(script)}):
        graphs, recomputations = map(int, RAN.findall(planned.text)[0])
        assert 0 < graphs < recomputations, planned.text
