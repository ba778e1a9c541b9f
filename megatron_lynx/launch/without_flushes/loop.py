"""Lets Megatron's training loop train without flushes: sets up the second version of the weights and the hooks, and undoes both.

train begins                              here
-----------------------------------------------------------------------------------------------------------------
  forward_backward_func                   the pipeline's: all backwards of this batch, some forwards of the next
  optimizer.step                          on the version that is retired; rate, norm and loss are this batch's
  evaluate, save_checkpoint               only behind a batch that drained
  checkpoint_and_decide_exit              a signal: remembered, and the next batch drains
train ends                                everything given back
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_lynx.apply import hook as holding
from megatron_lynx.double_buffered.hooks import claims as schedule_claims
from megatron_lynx.double_buffered.pipeline import DoubleBuffered
from megatron_lynx.errors import HookRefused, LynxError
from megatron_lynx.launch.agreement import agree, on_rank_0
from megatron_lynx.launch.hooks.stopping import claims as stopping_claims
from megatron_lynx.launch.without_flushes.draining import Draining
from megatron_lynx.plan import Plan
from megatron_lynx.units import format_bytes


@contextmanager
def without_flushes(model: Any, optimizer: Any, plan: Plan | None = None) -> Iterator[DoubleBuffered]:
    """Megatron's loop trains without flushes inside. All ranks enter, or none: a refusal of one ends all of them.

    `plan` says whether updates are deferred; by default they are.
    """
    from megatron.training import training
    from megatron.training.global_vars import get_args

    args, error = get_args(), None
    try:
        pipeline = _pipeline(model, optimizer, args, plan)
        draining = Draining(args, training)
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


def _pipeline(model: Any, optimizer: Any, args: Any, plan: Plan | None) -> DoubleBuffered:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return DoubleBuffered(
        model,
        optimizer,
        microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        defer_updates=plan is None or plan.defer_updates,
    )


def _say_begun(pipeline: DoubleBuffered) -> None:
    weights = format_bytes(pipeline.versions.buffers.extra_bytes)
    gradients = pipeline.gradients.buffers.extra_bytes if pipeline.gradients is not None else 0
    on_rank_0(
        f"megatron-lynx: training without flushes, on gradients that are one update old; on rank 0 the second version of the "
        f"weights takes {weights}, a second gradient {format_bytes(gradients)}"
    )
