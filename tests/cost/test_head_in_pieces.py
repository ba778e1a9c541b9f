"""A head in pieces: what the last stage holds, counted on ranks beside stock, and the seconds that it costs."""

from __future__ import annotations

import pytest

from megatron_lynx.config.job import Head
from megatron_lynx.cost.communication import head_of
from megatron_lynx.cost.ends import logits_at_loss_bytes
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import BlockProfile, LinkPoint
from megatron_lynx.profiler.shape import LayerShape
from tests.config.jobs import catalogued_job
from tests.cost.moments_on_ranks import count
from tests.cost.test_moments import ROW_BYTES
from tests.long import long
from tests.stock.parts import stage_parts
from tests.tiny_jobs import tiny_job
from tests.transparency.plans import plan_for

SIZE = {"layers": 2, "hidden": 32, "ffn": 64, "vocab": 4096, "seq": 128, "micro": 2, "microbatches": 2}
UNTIED = {"tied_embeddings": False}
JOBS = {
    "fp32": UNTIED,
    "fp32, tied": {},
    "bf16": {**UNTIED, "dtype": "bf16"},
    "Megatron's fused loss": {**UNTIED, "cross_entropy": "native"},
    "tensor and sequence": {**UNTIED, "tensor": 2, "sequence_parallel": True},
    "two stages": {"pipeline": 2, "layers": 4},
}
PIECES = 8


@pytest.mark.parametrize("name", [*(name for name in JOBS if name != "fp32"), *long("fp32")])
def test_the_last_stage_holds_the_logits_of_one_piece(own_pool_of, name):
    job = tiny_job("gpt", **SIZE | JOBS[name]).model_copy(update={"policy": "none"})
    pieced = job.model_copy(update={"head": Head(pieces=PIECES)})
    plan = plan_for(job, lambda _: ())
    plan = Plan.model_validate(plan.model_dump() | {"head": {"pieces": PIECES}})
    pool, last = own_pool_of(job.gpus), job.parallel.pipeline - 1
    stock, ours = (pool.run(count, job, {}, each)[-1] for each in (None, plan))
    shape = LayerShape.of(job)
    parts, whole = stage_parts(pieced, last), stage_parts(job, last)
    predicted = max(parts.at("loss").total, parts.at("head_backward").total)
    held = 2 * shape.gathered_bytes if job.gpus > 1 else 0  # by gloo, of exchanges that are over
    small = ROW_BYTES * shape.tokens
    over = ours["loss"] - predicted
    assert -small - held - parts.running["messages"] <= over <= small + held, (over, ours, parts.fullest.totals)
    spared = max(whole.at("loss").total, whole.at("head_backward").total) - predicted
    counted = max(stock["loss"], stock["head_backward"]) - ours["loss"]
    assert counted == pytest.approx(spared, abs=2 * (small + held + parts.running["messages"]))
    assert counted > logits_at_loss_bytes(shape) / 3, "which is worth it"


def test_bytes_of_a_real_head():
    """Llama 3 8B, one sequence of 8192 tokens: of 128256 logits each 6 bytes, of which an eighth is left."""
    job = catalogued_job("llama3-8b", "h100-80g", gpus=8, batch=8, parallel={"tensor": 1})
    pieced = job.model_copy(update={"head": Head(pieces=8)})
    whole, parts = stage_parts(job, 0), stage_parts(pieced, 0)
    logits = 8192 * 128256
    assert (whole.at("loss").logits, parts.at("loss").logits) == (6 * logits, 6 * logits // 8)
    assert parts.at("loss").in_hand == 8192 * 4096 * 2, "the gradient of all rows: the weight's is added up in Megatron's buffer"


def test_seconds_of_pieces_are_logits_once_more_and_what_no_longer_hides():
    profile = analytic_profile(catalogued_job("llama3-8b", "h100-80g", gpus=8, batch=8, parallel={"tensor": 1}))
    head = BlockProfile(forward_s=2.0, backward_s=3.0)
    links = (LinkPoint(kind="all_reduce", bytes=1, seconds=0.25),)
    alone = profile.model_copy(update={"head": head, "head_summand_s": 0.125, "links": ()})
    assert head_of(alone, 1) == head
    assert head_of(alone, 1, pieces=4) == BlockProfile(forward_s=2.0, backward_s=3.0 + 2.0 + 3 * 0.125)
    reduced = alone.model_copy(update={"links": links})
    assert head_of(reduced, 1).backward_s == 3.0, "behind the weight's gradient"
    assert head_of(reduced, 1, pieces=4).backward_s == 5.375 + 0.25
