"""The order of micro-batches.

Replaces              `forward_step` and `backward_step` of `megatron.core.pipeline_parallel.schedules` (globals of the module,
                      read at each call by every schedule).
Why                   which micro-batch runs, and whose backward comes next in which phase, follows from the order of these calls.
Calls the original    once per call, with the arguments as they came (`backward_step` lost parameters in 0.15 and in 0.17).
Holds                 nothing; the engine knows the micro-batches in flight by weak reference to their output tensor.
Passes through when   gradients are off, or the pass is one of another model (a critic's, say), which may be under a plan of
                      its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from functools import wraps
from typing import Any

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.live_run import unwrapped
from megatron_lynx.runtime.engine import Engine


def claims(engine: Engine, chunks: Container[int]) -> Iterator[Claim]:
    """`chunks`: the ids of the models that the plan is for."""
    from megatron.core.pipeline_parallel import schedules

    def forward(original: Any) -> Any:
        signature = inspect.signature(original)

        @wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if id(unwrapped(given["model"])[1]) not in chunks:
                return original(*args, **kwargs)
            chunk = given.get("vp_stage") or 0
            with engine.forward_pass(given["current_microbatch"], chunk, given["num_microbatches"]) as ended_with:
                result = original(*args, **kwargs)
                ended_with(result)
            return result

        return forward_step

    def backward(original: Any) -> Any:
        @wraps(original)
        def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not engine.expects_backward:
                return original(input_tensor, output_tensor, *args, **kwargs)
            with engine.backward_pass(output_tensor):
                return original(input_tensor, output_tensor, *args, **kwargs)

        return backward_step

    yield Claim(schedules, "forward_step", forward, "begins and ends a micro-batch's forward")
    yield Claim(schedules, "backward_step", backward, "begins and ends a micro-batch's backward")
