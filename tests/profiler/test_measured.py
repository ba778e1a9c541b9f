"""Measuring a real layer: nothing is missed, and what is found is what shapes say."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_lynx.cost.layer import LayerShape, half_tensors, item_flops
from megatron_lynx.errors import ConfigError
from megatron_lynx.items import HALVES, ITEMS_OF
from megatron_lynx.testbed.profiling import measure_profile
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.profiler.on_ranks import measure_messages, measure_one, measure_sleeping, measure_squaring

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
JOBS = {
    "gpt with dropout": tiny_job("gpt", micro=1),
    "gpt, two sequences": tiny_job("gpt", **NO_DROPOUT),
    "gpt in bf16": tiny_job("gpt", micro=1, dtype="bf16", **NO_DROPOUT),
    "gpt in bf16 with dropout": tiny_job("gpt", micro=1, dtype="bf16"),
    "llama, grouped": tiny_job("llama"),
    "llama, a head of keys each": tiny_job("llama", kv_groups=4),
    "grouped without rotary": tiny_job("gpt", kv_groups=2, bias=False),
    "queries and keys normed": tiny_job("gpt", micro=1, qk_norm=True, **NO_DROPOUT),
    "queries and keys normed, in bf16": tiny_job("gpt", micro=1, qk_norm=True, dtype="bf16", **NO_DROPOUT),
    "queries and keys normed, grouped": tiny_job("llama", qk_norm=True),
    "queries and keys normed, grouped without rotary": tiny_job("gpt", kv_groups=2, qk_norm=True, bias=False),
    "a shard, queries and keys normed": tiny_job("llama", tensor=2, qk_norm=True, norm="layernorm"),
    "a shard": tiny_job("llama", tensor=2),
    "a shard with sequence parallelism": tiny_job("gpt", tensor=2, sequence_parallel=True),
}


def blocks(tensors):
    return Counter((tensor.made_by, tensor.saved_by, tensor.bytes) for tensor in tensors)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_a_real_layer_saves_what_its_shape_says(pool_of, job):
    measured = pool_of(1).run(measure_one, job)[0]
    shape = LayerShape(job.model, job.parallel, job.batch.micro)
    for half in HALVES:
        assert blocks(measured[half].tensors) == blocks(half_tensors(shape, half))
        assert measured[half].input_bytes == shape.input_bytes
        assert {item: measured[half].items[item].flops for item in ITEMS_OF[half]} == {
            item: item_flops(shape)[item] for item in ITEMS_OF[half]
        }


def test_every_item_has_its_seconds(pool_of):
    measured = pool_of(1).run(measure_one, tiny_job("llama"))[0]
    for half in HALVES:
        items = measured[half].items
        assert all(items[item].forward_s > 0 and items[item].backward_s > 0 for item in ITEMS_OF[half])
        assert all(items[item].dgrad_s > 0 and items[item].wgrad_s > 0 for item in items if item.startswith("linear_"))
        assert measured[half].saved_bytes == measured[half].input_bytes + sum(item.saved_bytes for item in items.values())


def test_a_block_is_timed_both_ways(pool_of):
    seconds, held = pool_of(1).run(measure_squaring)[0]
    assert seconds.forward_s > 0
    assert seconds.backward_s > 0
    assert held == {"given": 0, "made": 32, "own rows": 16}


def test_ranks_agree_on_the_links(pool_of):
    kinds, sizes = ("all_reduce", "all_gather", "reduce_scatter", "p2p"), (4096, 65536)
    one, other = pool_of(2).run(measure_messages, kinds, sizes)
    assert one == other, "every rank plans with the same figures"
    assert [(point.kind, point.bytes) for point in one] == [(kind, size) for kind in kinds for size in sizes]
    assert all(point.seconds > 0 for point in one)


def test_a_collective_disturbs_what_it_slows_and_nothing_else(pool_of):
    assert all(1 <= found < 1.5 for found in pool_of(2).run(measure_sleeping, 1.0))
    assert all(2 < found < 4 for found in pool_of(2).run(measure_sleeping, 3.0))


def test_layers_of_transformer_engine_are_refused():
    """Watched from outside, its norms would save nothing, and plans would keep them for ever."""
    with pytest.raises(ConfigError) as refused:
        measure_profile(tiny_job("gpt", implementation="transformer_engine"), place=None, announce=None)
    assert refused.value.problems[0].where == "job: model.implementation"
