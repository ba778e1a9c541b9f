"""The places where Megatron's training loop saves and stops, when it trains without flushes.

Replaces              `checkpoint_and_decide_exit` and `save_checkpoint` of `megatron.training.training` (globals, read by
                      `train` and by `save_checkpoint_and_time`).
Why                   a signal, or the end of the time that was given, is only noticed when a batch is over, and then forwards of
                      the next one have begun. It is remembered, the next batch drains, and Megatron saves and stops there.
Calls the original    once per call where the pipeline is empty, with the arguments as they came.
Holds                 nothing; what was noticed is `Draining`'s.
Passes through when   the pipeline is empty. Where it is not, nothing is due that Megatron's arguments tell, so nothing is missed;
                      whoever saves all the same is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

from megatron_lynx.apply.hook import Claim
from megatron_lynx.double_buffered.pipeline import DoubleBuffered
from megatron_lynx.launch.without_flushes.draining import Draining


def claims(training: Any, pipeline: DoubleBuffered, draining: Draining) -> Iterator[Claim]:
    """`training`: the module of Megatron's loop."""

    def stop(original: Any) -> Any:
        @wraps(original)
        def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> Any:
            if pipeline.drained:
                return original(*args, **kwargs)
            draining.look()
            return False

        return checkpoint_and_decide_exit

    def save(original: Any) -> Any:
        @wraps(original)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            pipeline.check_drained("saving")
            return original(*args, **kwargs)

        return save_checkpoint

    yield Claim(training, "checkpoint_and_decide_exit", stop, "saves, and decides whether to stop, behind a batch")
    yield Claim(training, "save_checkpoint", save, "saves weights")
