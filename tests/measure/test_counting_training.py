"""The counter on the real megatron-core: what one more layer holds under stock full recomputation is known in advance."""

from __future__ import annotations

import torch

from tests.measure.on_ranks import count
from tests.tiny_jobs import tiny_job

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SEQ, MICRO, HIDDEN = 64, 2, 64


def jobs(setting):
    return [(tiny_job("gpt", layers=layers, seq=SEQ, micro=MICRO, hidden=HIDDEN), setting) for layers in (2, 4)]


def test_stock_full_holds_one_input_and_the_random_states_per_layer(pool_of):
    few, many, few_none, many_none = pool_of(1).run(count, [*jobs(FULL), *jobs({})])[0]
    input_bytes = SEQ * MICRO * HIDDEN * 4
    states_bytes = 3 * torch.get_rng_state().nbytes  # the CPU's, the device's, and the tracker's, which is Megatron's own
    # gloo's thread may still hold the result of a reduction (a float per token) when the forward pass returns
    in_flight_bytes = SEQ * MICRO * 4
    first = [use.marks[0].bytes for use in (few, many)]
    assert abs(first[1] - first[0] - 2 * (input_bytes + states_bytes)) <= in_flight_bytes
    assert many_none.marks[0].bytes - few_none.marks[0].bytes > 5 * (first[1] - first[0])
    assert len(many.marks) == 2, "one mark per micro-batch"


def test_gradients_do_not_count(pool_of):
    use = pool_of(1).run(count, jobs({})[:1])[0][0]
    one, other = (mark.bytes for mark in use.marks)
    assert abs(one - other) <= 2 * SEQ * MICRO * 4, "the second micro-batch, with gradients there, holds what the first did"
    assert use.peak_bytes > use.resident_bytes
