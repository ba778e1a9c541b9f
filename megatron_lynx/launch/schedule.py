"""`--lynx-schedule double-buffered`: Megatron's training loop with a pipeline that is not drained before each update.

`forward_backward_func` runs all backwards of a batch and some forwards of the next. Megatron's arguments tell when a batch begins
whether it drains: before an evaluation, a checkpoint, an exit, a skipped batch and the end. Batches are numbered as Megatron
numbers iterations: from 1, over all runs of a training.

Replaces              `checkpoint_and_decide_exit` and `save_checkpoint` of `megatron.training.training` (globals, read by
                      `train` and by `save_checkpoint_and_time`).
Why                   a signal is only noticed at the end of a batch, when forwards of the next one have begun.
Calls the original    once per call, with the same arguments; `args.save` is None meanwhile if the pipeline is not empty.
Holds                 nothing; `Draining` remembers a signal or the time limit, so that the next batch drains.
Passes through when   the pipeline is empty. Otherwise Megatron stops a batch later; a save is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_lynx.apply import hook as holding
from megatron_lynx.apply.hook import Claim, instead
from megatron_lynx.double_buffered.pipeline import DoubleBuffered
from megatron_lynx.double_buffered.pipeline import claims as schedule_claims
from megatron_lynx.errors import HookRefused, LynxError
from megatron_lynx.launch.ending import agree, on_rank_0
from megatron_lynx.plan import Plan
from megatron_lynx.units import format_bytes


@contextmanager
def without_flushes(model: Any, optimizer: Any, plan: Plan | None = None) -> Iterator[DoubleBuffered]:
    """Train without flushes inside. All ranks enter, or all exit. `plan` says whether updates are deferred (the default)."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import training
    from megatron.training.global_vars import get_args

    args, error = get_args(), None
    try:
        sizes = {"seq_length": args.seq_length, "micro_batch_size": args.micro_batch_size}
        defers = plan is None or plan.defer_updates
        pipeline = DoubleBuffered(model, optimizer, microbatches=get_num_microbatches(), defer_updates=defers, **sizes)
        draining = Draining(args)
        claims = [*schedule_claims(training, pipeline, draining.now), *stopping_claims(training, pipeline, draining)]
        if refused := holding.verify(claims):
            raise HookRefused("this Megatron-LM cannot be trained without flushes", refused)
    except LynxError as found:
        error = found
    agree(error)
    hooks = holding.put_in_place(claims)
    try:
        _say_begun(pipeline)
        yield pipeline
    finally:
        holding.give_back(hooks)


def _say_begun(pipeline: DoubleBuffered) -> None:
    weights = format_bytes(pipeline.versions.buffers.extra_bytes)
    gradients = pipeline.gradients.buffers.extra_bytes if pipeline.gradients is not None else 0
    on_rank_0(
        f"megatron-lynx: training without flushes, on gradients that are one update old; on rank 0 the second version of the "
        f"weights takes {weights}, a second gradient {format_bytes(gradients)}"
    )


def must_drain(args: Any, number: int) -> bool:
    """Whether the pipeline must be empty after batch `number`. `args`: Megatron's."""
    saves = args.save and (_is_due(args.save_interval, number) or _is_due(args.non_persistent_save_interval, number))
    ends = number >= args.train_iters or _is_due(args.exit_interval, number)
    skipped = {number, number + 1} & set(args.iterations_to_skip or ())  # counted from 0 until 0.17
    evaluates = args.do_valid and _is_due(args.eval_interval, number)
    return bool(ends or saves or skipped or evaluates or number in (args.phase_transition_iterations or ()))


def _is_due(interval: int | None, number: int) -> bool:
    return bool(interval) and number % interval == 0  # type: ignore[operator]


class Draining:
    """Decides for each batch whether the pipeline must be empty after it. All ranks decide alike."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._wants_to_stop = False

    def now(self) -> bool:
        return self._wants_to_stop or must_drain(self._args, self._args.curr_iteration + 1)

    def look(self, decide: Callable[[], bool]) -> None:
        """Let Megatron decide whether to stop (a signal, the time limit), without saving. If so, the next batch drains, and
        Megatron stops there."""
        save, self._args.save = self._args.save, None
        try:
            self._wants_to_stop |= decide()
        finally:
            self._args.save = save


def stopping_claims(training: Any, pipeline: DoubleBuffered, draining: Draining) -> Iterator[Claim]:
    def stop(original: Any, *args: Any, **kwargs: Any) -> Any:
        if pipeline.drained:
            return original(*args, **kwargs)
        draining.look(lambda: bool(original(*args, **kwargs)))
        return False

    def save(original: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline.check_drained("saving")
        return original(*args, **kwargs)

    yield Claim(training, "checkpoint_and_decide_exit", instead(stop), "saves, and decides whether to stop, behind a batch")
    yield Claim(training, "save_checkpoint", instead(save), "saves weights")
