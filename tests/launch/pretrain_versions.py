"""What training without flushes must equal, written without it: stock's flushing loop, batch j on W(j-1), its update to W(j).

With a loss scale that moves, on the one that was in force with W(j-1): what Megatron divides by is made up for.

DRAINED   batches behind which versions are counted anew, like `3,4`
SIGNAL    the batch behind which rank 1 is asked to stop
SCRIPT    another than `pretrain_tiny.py`
"""

import os
import runpy
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.utils import get_model_config
from megatron.training import training

DRAINED = [int(number) for number in os.environ.get("DRAINED", "").split(",") if number]


def batches_on_older_weights():
    stock, state = training.get_forward_backward_func, {"older": None}

    def get_forward_backward_func(*args, **kwargs):
        run = stock(*args, **kwargs)

        def batch(*, model, forward_only, **settings):
            if forward_only:
                return run(model=model, forward_only=forward_only, **settings)
            parameters = list(model[0].parameters())
            newest = [parameter.detach().clone() for parameter in parameters], loss_scale(model[0])
            older = state["older"] or newest
            load(parameters, older[0])
            with scaled_by(model[0], older[1]):
                losses = run(model=model, forward_only=forward_only, **settings)
            load(parameters, newest[0])
            drained = training.get_args().curr_iteration + 1 in DRAINED
            state["older"] = None if drained else newest
            return losses

        return batch

    return get_forward_backward_func


def loss_scale(chunk):
    return float(get_model_config(chunk).grad_scale_func(torch.ones(1)))


@contextmanager
def scaled_by(chunk, scale):
    config, current = get_model_config(chunk), loss_scale(chunk)
    stock, config.grad_scale_func = config.grad_scale_func, lambda loss: loss * scale
    yield
    config.grad_scale_func = stock
    for buffer in chunk.buffers if scale != current else ():
        assert buffer.grad_data.dtype == torch.float32, "scales are powers of two, so this is exact"
        buffer.grad_data.mul_(current / scale)


def load(parameters, weights):
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)


def asked_to_stop_behind(number):
    log = training.training_log

    def training_log(*args, **kwargs):
        if training.get_args().curr_iteration + 1 == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return log(*args, **kwargs)

    return training_log


if __name__ == "__main__":
    if DRAINED:
        training.get_forward_backward_func = batches_on_older_weights()
    if "SIGNAL" in os.environ and os.environ["RANK"] == "1":
        training.training_log = asked_to_stop_behind(int(os.environ["SIGNAL"]))
    script = os.environ.get("SCRIPT", Path(__file__).with_name("pretrain_tiny.py"))
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(str(script), run_name="__main__")
