"""The order of a stage's passes without flushes, which the runtime follows: by batch, with micro-batches counted since filling.

stage 0 of 2, m = 2      0F 1F 0B 2F 1B | 3F 2B 4F 3B | 5F 4B 5B          | a batch begins
turns of batch 1                          3F 2B 4F 3B   5F 4B 6F 5B       its own passes, and those behind them: what is
                                                                          fetched from the host comes before its batch begins
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_lynx.runtime.order import StageOrder
from megatron_lynx.schedule import one_f_one_b
from megatron_lynx.schedule.double_buffered import batch_order, order
from megatron_lynx.schedule.schedule import Action, Phase, VirtualMicroBatch

FEW_BATCHES = 3
"""Enough batches for everything that can happen: filling, steady running, draining."""


def order_of_batch(pipeline: int, stage: int, microbatches: int, batch: int, *, deferral: int, drains: bool) -> StageOrder:
    """The passes of a batch's run and of the run behind it."""
    batches = [batch] if drains else [batch, batch + 1]
    orders = [batch_order(pipeline, stage, microbatches, index, deferral=deferral, drains=drains) for index in batches]
    runs = [[step for step in order if isinstance(step, Action)] for order in orders]
    completing = {virtual for index, run in zip(batches, runs, strict=True) for virtual in _completing(run, microbatches, index)}
    steps = [step for run in runs for step in run]
    return StageOrder([*_phased(steps, one_f_one_b.warmup(pipeline, stage))], completing)


def _completing(run: Sequence[Action], microbatches: int, batch: int) -> set[VirtualMicroBatch]:
    """The backwards of a run behind which gradients may be read, or pointed at another buffer: the last one of its batch, and its
    own last one."""
    own = [step for step in run if step.kind == "B"]
    last = (batch + 1) * microbatches - 1
    return {step.virtual for step in own if step is own[-1] or step.micro_batch == last}


def order_of_few_batches(pipeline: int, stage: int, microbatches: int) -> StageOrder:
    """The passes from filling to draining."""
    steps = [step for step in order(pipeline, stage, microbatches, FEW_BATCHES) if isinstance(step, Action)]
    return StageOrder([*_phased(steps, one_f_one_b.warmup(pipeline, stage))])


def _phased(actions: Sequence[Action], ahead: int) -> Iterator[tuple[Action, Phase]]:
    """Actions with their phases, as in `schedule.Schedule.phases`: a backward behind another one is in cool-down."""
    phase: Phase = "cooldown"
    for action in actions:
        if action.kind == "F":
            phase = "steady" if 0 < ahead <= action.micro_batch else "warmup"
        yield action, phase
        if action.kind == "B":
            phase = "cooldown"
