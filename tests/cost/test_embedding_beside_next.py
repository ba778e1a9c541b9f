"""The embedding's backward beside what the next micro-batch's loss keeps, in the combined schedule on one stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_lynx.config import Experts
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.cost.embedding_on_ranks import count_embedding
from tests.long import long
from tests.stock.parts import stage_parts
from tests.tiny_jobs import tiny_job


@pytest.mark.parametrize("overlapped", [True, *long(False)])
def test_the_embeddings_backward(own_pool_of: Callable[[int], RankPool], overlapped: bool) -> None:
    """Its gradient was counted beside nothing: 2 MiB too little here, where nothing else of a micro-batch is as large."""
    experts = Experts(count=4, per_token=2, ffn=96, overlapped=overlapped)
    size = {"layers": 2, "hidden": 64, "ffn": 256, "vocab": 8192, "seq": 64, "micro": 1, "microbatches": 4}
    job = tiny_job("gpt", **size, bias=False, dtype="bf16", tied_embeddings=False, expert=2, replicas=2, experts=experts)
    *counted, last = own_pool_of(2).run(count_embedding, job)[0]
    parts, small = stage_parts(job.model_copy(update={"policy": "none"}), 0), 20_000
    alone = parts.at("embedding_backward").total
    assert abs(last - alone) < 3 * small, "nothing is beside the last one"
    most = max(parts.at(moment).total for moment in ("loss", "head_backward", "backward", "embedding_backward"))
    for held in counted:
        assert abs(held - (parts.at("loss").total if overlapped else alone)) < 3 * small
        assert held < most + 3 * small
    if overlapped:
        assert parts.at("loss").logits == LayerShape.of(job).tokens * 8192 * 4, "the softmax"
        assert parts.at("loss").total - alone > parts.activations + parts.at("loss").logits - small
