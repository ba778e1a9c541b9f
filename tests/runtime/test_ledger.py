"""Which micro-batch a pass belongs to, and which backward comes next."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lynx.runtime.frame import Frame, MicroBatch
from megatron_lynx.runtime.order import Ledger, StageOrder
from megatron_lynx.schedule.schedule import Action
from tests.runtime.tiny_half import policy

ONE_AHEAD = StageOrder(
    [
        (Action(0, "F", 0), "warmup"),
        (Action(1, "F", 0), "steady"),
        (Action(0, "B", 0), "steady"),
        (Action(1, "B", 0), "cooldown"),
    ]
)


def ledger() -> Ledger:
    return Ledger(lambda microbatches: ONE_AHEAD)


def output() -> Tensor:
    return torch.ones(1, requires_grad=True) * 1


def forward(of: Ledger, index: int, chunk: int = 0) -> tuple[MicroBatch, Tensor]:
    of.begin_forward(index, chunk, 2)
    made = output()
    micro_batch = of.end_forward([made])
    assert micro_batch is not None
    return micro_batch, made


def frame(micro_batch: MicroBatch, layer: int = 1) -> Frame:
    return Frame(policy(layer=layer), micro_batch, lambda hidden: hidden, lambda frame: None)


def test_a_micro_batch_is_recognised_by_its_output() -> None:
    """By identity: outputs of equal values, and aliases, are others."""
    seen = ledger()
    (first, first_output), (second, second_output) = forward(seen, 0), forward(seen, 1)
    assert seen.begin_backward(first_output.view_as(first_output)) is None
    assert seen.begin_backward([second_output]) is second
    assert seen.begin_backward(first_output) is first
    assert (first.number, second.number) == (0, 1)


def test_an_output_that_is_dropped_is_not_held() -> None:
    """Who drops a graph drops its micro-batch: nothing is in flight any more, and the next step begins."""
    seen = ledger()
    micro_batch, made = forward(seen, 0)
    assert seen.busy
    assert micro_batch.alive
    del made
    assert not micro_batch.alive
    assert not seen.busy
    again, _made = forward(seen, 0)
    assert (again.number, again.index) == (1, 0)


def test_a_step_without_backwards_leaves_nothing_in_flight_to_the_next() -> None:
    """A loss that was only evaluated, with gradients on: halves of experts would fall back for rows that nobody holds."""
    seen = ledger()
    (_, _first), (_, _second) = forward(seen, 0), forward(seen, 1)
    own, _made = forward(seen, 0)
    assert seen.in_flight_beside(own) == []


def test_no_backward_can_come_for_an_output_without_gradient() -> None:
    seen = ledger()
    seen.begin_forward(0, 0, 2)
    assert seen.end_forward(torch.ones(1)) is None
    assert not seen.busy


def test_whose_backward_comes_next() -> None:
    seen = ledger()
    (first, first_output), (second, second_output) = forward(seen, 0), forward(seen, 1)
    assert seen.coming is first
    seen.end_backward(seen.begin_backward(first_output))
    assert seen.coming is second
    seen.end_backward(seen.begin_backward(second_output))
    assert seen.coming is None


def test_whose_backward_follows_a_forward() -> None:
    seen = ledger()
    first, _first_output = forward(seen, 0)
    assert not seen.before_other, "no forward runs"
    seen.begin_forward(1, 0, 2)
    assert seen.before_other
    assert not first.at_once
    assert seen.coming is first


def test_overlapping_batches() -> None:
    """A batch is announced. Its micro-batches are counted on, and those of the batch before stay in flight."""
    seen = Ledger()
    seen.begin_batch(ONE_AHEAD, fills=True)
    passes = [forward(seen, 0), forward(seen, 1)]
    seen.end_backward(seen.begin_backward(passes[0][1]))
    behind = StageOrder([(Action(2, "F", 0), "steady"), (Action(1, "B", 0), "steady")])
    seen.begin_batch(behind, fills=False)
    seen.begin_forward(0, 0, 2)
    assert seen.before_other
    assert seen.coming is passes[1][0]
    third = seen.end_forward(made := output())
    assert third is not None
    assert (third.number, third.index) == (2, 2)
    assert seen.begin_backward(passes[1][1]) is passes[1][0]
    assert seen.begin_backward(made) is third


def test_a_pipeline_that_is_filled_anew_counts_from_0() -> None:
    seen = Ledger()
    seen.begin_batch(ONE_AHEAD, fills=True)
    for index in range(2):
        forward(seen, index)
    seen.begin_batch(ONE_AHEAD, fills=True)
    micro_batch, _made = forward(seen, 0)
    assert (micro_batch.number, micro_batch.index) == (2, 0)


def test_frames_are_found_by_micro_batch_and_half() -> None:
    """And are held weakly: they belong to autograd's graph."""
    seen = ledger()
    (first, _a), (second, _b) = forward(seen, 0), forward(seen, 1)
    frames = [frame(first), frame(second), frame(second, layer=2)]
    for one in frames:
        seen.keep(one)
    assert seen.frame_of(first, (1, "mlp")) is frames[0]
    assert seen.frame_of(second, (1, "mlp")) is frames[1]
    assert seen.frame_of(second, (2, "mlp")) is frames[2]
    assert seen.frame_of(first, (2, "mlp")) is None
    frames.clear()
    del one
    assert seen.frame_of(first, (1, "mlp")) is None


def test_outside_of_schedules_a_repeated_layer_begins_the_next_micro_batch() -> None:
    seen = Ledger()
    first = seen.micro_batch_for((1, "mlp"))
    held = frame(first)
    seen.keep(held)
    assert seen.micro_batch_for((2, "mlp")) is first
    second = seen.micro_batch_for((1, "mlp"))
    assert second.number == first.number + 1
    assert seen.micro_batch_for((5, "mlp"), chunk=1).number == second.number + 1


def test_entering_a_half_leaves_the_one_before() -> None:
    """Collectives are counted from 0."""
    seen = ledger()
    micro_batch, _made = forward(seen, 0)
    frames = [frame(micro_batch, layer) for layer in (2, 1)]
    seen.enter(frames[0])
    seen.ordinal = 2
    seen.enter(frames[1])
    assert seen.entered is frames[1]
    assert seen.ordinal == 0
    seen.leave()
    assert seen.entered is None


def test_a_step_that_failed_is_forgotten() -> None:
    seen = ledger()
    _, made = forward(seen, 0)
    seen.begin_forward(1, 0, 2)
    seen.abort()
    assert not seen.busy
    assert seen.begin_backward(made) is None
    assert seen.coming is None
