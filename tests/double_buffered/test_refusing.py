"""What does not go together with two versions is refused by name, before anything is changed."""

from __future__ import annotations

import pytest

from megatron_lynx.errors import ConfigError, HookRefused
from tests.tiny_jobs import tiny_job

from . import on_ranks

DDP = {"ddp": True, "optimizer": "megatron"}
CASES = [
    (on_ranks.second_chunk, {}, ConfigError, ["found 2, needed 1", "without interleaving"]),
    (on_ranks.overlapped_gather, DDP, HookRefused, ["DDP config: overlap_param_gather: found True, needed off"]),
    (on_ranks.experts_and_fp8, DDP, HookRefused, ["num_moe_experts: found 4", "fp8: found hybrid, needed off"]),
    (on_ranks.unknown_optimizer, {}, HookRefused, ["optimizer: found object", "DistributedOptimizer"]),
    (on_ranks.nothing, {"defer_updates": True}, HookRefused, ["needed Megatron's DistributedDataParallel"]),
    (on_ranks.plan_installed, {}, HookRefused, ["a plan that is installed"]),
]


@pytest.mark.parametrize(("spoil", "how", "kind", "says"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_it_is_refused(pool_of, spoil, how, kind, says):
    for refused, text in pool_of(1).run(on_ranks.refused, tiny_job("gpt"), how, spoil):
        assert refused is kind
        assert [words for words in says if words not in text] == []


def test_a_plan_that_comes_later_is_refused(pool_of):
    for text in pool_of(1).run(on_ranks.plan_comes_later, tiny_job("gpt")):
        assert "a plan was installed into a run without flushes" in text


def test_fewer_micro_batches_than_stages(pool_of):
    job = tiny_job("gpt", pipeline=2, microbatches=1)
    for refused, text in pool_of(2).run(on_ranks.refused, job, {}, on_ranks.nothing):
        assert refused is ConfigError
        assert "found 1, needed at least 2" in text
