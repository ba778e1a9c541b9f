"""The order of micro-batches.

Replaces              `forward_step` and `backward_step` of `megatron.core.pipeline_parallel.schedules` (globals of the module,
                      read at each call by every schedule). With overlapped exchanges of experts also
                      `combined_forward_backward_step` of `combined_1f1b`, which interleaves one micro-batch's forward with
                      another one's backward, or runs one of them.
Why                   the order of these calls says which micro-batch runs, and whose backward comes next in which phase.
Calls the original    once per call, with the arguments as they came (`backward_step` lost parameters in 0.17).
Holds                 nothing; the engine refers weakly to the output tensors of micro-batches in flight.
Passes through when   gradients are off, or the pass is another model's (a critic's, say), which may have its own plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.live_run import unwrapped
from megatron_lynx.runtime.engine import Engine


def claims(engine: Engine, chunks: Container[int], *, combined: bool = False) -> Iterator[Claim]:
    """`chunks`: the ids of the plan's models. `combined`: whether forwards and backwards are interleaved."""
    from megatron.core.pipeline_parallel import schedules

    def forward(original: Any) -> Any:
        signature = inspect.signature(original)

        @wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if not _is_in(given["model"], chunks):
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
            if not engine.ledger.expects_backward:
                return original(input_tensor, output_tensor, *args, **kwargs)
            with engine.backward_pass(output_tensor) as returns:
                gradient = original(input_tensor, output_tensor, *args, **kwargs)
                returns(gradient)
            return gradient

        return backward_step

    yield Claim(schedules, "forward_step", forward, "begins and ends a micro-batch's forward")
    yield Claim(schedules, "backward_step", backward, "begins and ends a micro-batch's backward")
    if combined:
        yield _combined_claim(engine, chunks)


def _is_in(model: Any, chunks: Container[int]) -> bool:
    return model is not None and id(unwrapped(model)[1]) in chunks


def _combined_claim(engine: Engine, chunks: Container[int]) -> Claim:
    from megatron.core.pipeline_parallel import combined_1f1b

    def hooked(original: Any) -> Any:
        signature = inspect.signature(original)

        @wraps(original)
        def combined_forward_backward_step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            forward, backward = (_is_in(given[name], chunks) for name in ("f_model", "b_model"))
            with ExitStack() as stack:
                if backward:
                    stack.enter_context(engine.backward_pass(given["b_output_tensor"]))
                if forward:
                    place = given["current_microbatch"], given.get("f_model_chunk_id") or 0, given["num_microbatches"]
                    ended_with = stack.enter_context(engine.forward_pass(*place))
                result = original(*args, **kwargs)
                if forward:
                    ended_with(result)
            return result

        return combined_forward_backward_step

    reason = "runs a forward and a backward in turns"
    return Claim(combined_1f1b, "combined_forward_backward_step", hooked, reason)
