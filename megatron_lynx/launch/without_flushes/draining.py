"""Behind which batches the pipeline must be empty.

                    known when the batch begins                            not known: the next batch drains
    batch j         evaluated, saved, the last one, exit, to be skipped    a signal came, the time is over
                         └─ from Megatron's arguments                           └─ looked for where Megatron would look

Batches are counted as Megatron counts iterations: from 1, over all runs of a training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def reasons(args: Any, number: int) -> Iterator[str]:
    """Why the pipeline must be empty behind batch `number`; nothing: it need not be.

    `args`: Megatron's, as the training loop reads them.
    """
    if number >= args.train_iters:
        yield "the last batch"
    if args.do_valid and _is_due(args.eval_interval, number):
        yield "an evaluation"
    if args.save and (_is_due(args.save_interval, number) or _is_due(args.non_persistent_save_interval, number)):
        yield "a checkpoint"
    if _is_due(args.exit_interval, number) or number in (args.phase_transition_iterations or ()):
        yield "an exit"
    if {number, number + 1} & set(args.iterations_to_skip or ()):  # counted from 0 until 0.17
        yield "the batch behind it is skipped"


def _is_due(interval: int | None, number: int) -> bool:
    return bool(interval) and number % interval == 0  # type: ignore[operator]


class Draining:
    """Says for each batch of a run whether the pipeline must be empty behind it. All ranks give the same answers.

    Args:
        args: Megatron's.
        training: its module `megatron.training.training`.
    """

    def __init__(self, args: Any, training: Any) -> None:
        self._args = args
        self._training = training
        self._wants_to_stop = False

    def now(self) -> bool:
        """Whether the pipeline must be empty behind the batch that begins now."""
        return self._wants_to_stop or any(reasons(self._args, self._args.curr_iteration + 1))

    def look(self) -> None:
        """Ask, where Megatron would ask, whether to stop: then the next batch drains, and it stops there. On all ranks."""
        self._wants_to_stop |= self._signalled() or self._out_of_time()

    def _signalled(self) -> bool:
        return bool(self._args.exit_signal_handler) and any(self._training.get_signal_handler().signals_received())

    def _out_of_time(self) -> bool:
        if not self._args.exit_duration_in_mins:
            return False
        minutes = (time.time() - self._training._TRAIN_START_TIME) / 60.0
        over = torch.tensor([minutes > self._args.exit_duration_in_mins], dtype=torch.int, device="cuda")
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        return bool(over.item())
