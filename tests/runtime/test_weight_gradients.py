"""Weight gradients that are pending: first in, first out for each linear; the oldest of a chunk; and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.figures import Figures
from megatron_lynx.runtime.device import Trace
from megatron_lynx.runtime.frame import ChunkPolicy, Frame, MicroBatch
from megatron_lynx.runtime.order import StageOrder
from megatron_lynx.runtime.surroundings import Surroundings
from megatron_lynx.runtime.weight_gradients import Entry, Linear, WeightGradients, blocks_of
from megatron_lynx.schedule.schedule import Action
from tests.runtime.devices import CPU
from tests.runtime.tiny_half import policy

FC1, QKV = (3, "linear_fc1"), (3, "linear_qkv")
ADDRESSES = count()


def entry(linear: Linear, micro_batch: int, chunk: int = 0, held: int = 10) -> Entry:
    return Entry(linear, "mlp", chunk, micro_batch, lambda: None, {next(ADDRESSES): held})


def none_pending() -> tuple[WeightGradients, Any]:
    progress: Any = SimpleNamespace(trace=Trace(CPU), counts=Figures())
    return WeightGradients(progress, (), Surroundings(()), reduced_in_backward=lambda: False), progress


def taken(pending: WeightGradients, linear: Linear) -> Iterator[int]:
    while (one := pending.take(linear)) is not None:
        yield one.micro_batch


def test_first_in_first_out() -> None:
    pending, _ = none_pending()
    for micro_batch in range(3):
        pending.add(entry(FC1, micro_batch))
        pending.add(entry(QKV, micro_batch))
    assert list(taken(pending, FC1)) == [0, 1, 2]
    assert (len(pending), pending.bytes) == (3, 30)
    assert list(taken(pending, QKV)) == [0, 1, 2]
    assert (len(pending), pending.bytes, pending.take(QKV)) == (0, 0, None)


def test_the_oldest_of_a_chunk() -> None:
    """Behind one that was taken out of the middle."""
    pending, _ = none_pending()
    for linear, micro_batch, chunk in ((FC1, 0, 0), ((7, "linear_fc1"), 0, 1), (QKV, 0, 0), (FC1, 1, 0)):
        pending.add(entry(linear, micro_batch, chunk))
    assert (pending.bytes_with(0, {}), pending.bytes_with(1, {}), pending.bytes_with(2, {})) == (30, 10, 0)
    assert pending.take(FC1) is not None
    oldest = [pending.take_oldest(0) for _ in range(3)]
    assert [(one.linear, one.micro_batch) for one in oldest if one is not None] == [(QKV, 0), (FC1, 1)]
    assert (pending.bytes_with(0, {}), len(pending)) == (0, 1)
    pending.clear()
    assert (len(pending), pending.bytes, pending.take_oldest(1)) == (0, 0, None)


def test_memory_counts_once_and_whole() -> None:
    """Two views of one block, of which one is a part; and another block."""
    block, other = torch.empty(100), torch.empty(7, dtype=torch.bfloat16)
    assert sorted(blocks_of([block[:10], block.view(10, 10), other]).values()) == [14, 400]


def test_experts_share_the_block_of_their_rows() -> None:
    """It counts once, until the last of them is computed; a wait takes those of one micro-batch."""
    (pending, _), rows = none_pending(), {1: 100}
    experts = [Entry((3, "experts_fc1"), "mlp", 0, number // 2, lambda: None, rows | {7 + number: 10}) for number in range(4)]
    for number, one in enumerate(experts):
        assert pending.bytes_with(0, one.blocks) == 110 + 10 * number
        pending.add(one)
    assert pending.take(experts[0].linear, experts[2]) is None, "the oldest is of another micro-batch"
    assert [pending.take(one.linear, experts[0]) for one in experts[:3]] == [*experts[:2], None]
    assert pending.bytes_with(0, {}) == 120
    assert pending.take_oldest(0) is experts[2]
    assert (pending.bytes_with(0, {}), pending.take_oldest(0), pending.bytes) == (110, experts[3], 0)


def test_a_wait_takes_those_of_one_micro_batch() -> None:
    """Of experts that run one by one all of them. What is left has later waits, as the plan counts on."""
    (gradients, progress), ran = none_pending(), []
    for number in range(6):
        computing = partial(ran.append, (number // 2, number % 2))
        gradients.add(Entry(FC1, "mlp", 0, number // 2, computing, {next(ADDRESSES): 10}))
    for micro_batch in range(3):
        gradients.run(FC1, "pipe.recv_backward")
        assert ran == [(done, expert) for done in range(micro_batch + 1) for expert in range(2)]
    assert progress.counts.filled == 6


def in_backward_of(layer: int, most_bytes: int) -> tuple[WeightGradients, Any]:
    """Deferring two linears of layer 3, while the backward of a half of this layer runs; and the progress."""
    deferred = {name: (RECV_BACKWARD,) for _, name in (FC1, QKV)}
    frame = Frame(policy(layer=layer, deferred=deferred), MicroBatch(0), lambda hidden: hidden, lambda frame: None)
    running = Action(0, "B")
    ledger = SimpleNamespace(entered=frame, running=running, completes_gradients=False, drains=False)
    progress: Any = SimpleNamespace(ledger=ledger, in_backward_of=frame, trace=Trace(CPU), counts=Figures())
    policies = [ChunkPolicy(most_delayed_bytes=most_bytes)]
    return WeightGradients(progress, policies, Surroundings(()), reduced_in_backward=lambda: False), progress


def test_one_that_is_larger_than_all_that_may_be_pending_is_computed_at_once() -> None:
    """Behind those before it: each sum is stock's in every bit."""
    gradients, progress = in_backward_of(3, most_bytes=100)
    ran: list[str] = []
    gradients.put_off(FC1, [torch.empty(20)], {0: lambda: ran.append("small")})
    assert (ran, gradients.bytes) == ([], 80)
    gradients.put_off(FC1, [torch.empty(30)], {0: lambda: ran.append("large")})
    assert (ran, gradients.bytes) == (["small", "large"], 0)
    assert (progress.counts.deferred, progress.counts.flushed, progress.counts.deferred_bytes) == (2, 2, 80)


def test_only_linears_of_the_layer_whose_backward_runs_are_put_off() -> None:
    """One of another layer is called outside of its half: nobody knows when its gradient is read."""
    assert in_backward_of(3, 100)[0].puts_off(FC1)
    assert not in_backward_of(2, 100)[0].puts_off(FC1)


@pytest.mark.parametrize(("completing", "ends"), [(None, [(1, 0), (1, 1)]), ({(0, 1)}, [(0, 1)])])
def test_gradients_are_whole_behind_a_chunks_last_backward(
    completing: set[tuple[int, int]] | None, ends: list[tuple[int, int]]
) -> None:
    """Or where a schedule says so that goes on with the next batch."""
    order = [(0, 1), (1, 1), (0, 0), (1, 0)]
    passes = StageOrder([(Action(micro_batch, "B", chunk), "cooldown") for micro_batch, chunk in order], completing)
    assert sorted(virtual for virtual in order if virtual in passes.completing) == ends


def test_counts_add_up() -> None:
    """What was done is summed, what was held at once is the larger."""
    both = Figures(deferred=3, filled=2, flushed=1, deferred_bytes=7) + Figures(deferred=1, filled=1, deferred_bytes=5)
    assert (both.deferred, both.filled, both.flushed, both.deferred_bytes) == (4, 3, 1, 7)
    held = Figures(host_bytes=5, expert_load=1.5) + Figures(host_bytes=3, expert_load=1.25)
    assert (held.host_bytes, held.expert_load) == (5, 1.5)
