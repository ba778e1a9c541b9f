"""What training without flushes must equal, written without it: stock's flushing loop, batch j on W(j-1), its update to W(j).

DRAINED   batches behind which versions are counted anew, like `3,4`
SIGNAL    the batch behind which rank 1 is asked to stop
SCRIPT    another than `pretrain_tiny.py`
"""

import os
import runpy
import signal
import sys
from pathlib import Path

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
            newest = [parameter.detach().clone() for parameter in parameters]
            load(parameters, state["older"] or newest)
            losses = run(model=model, forward_only=forward_only, **settings)
            load(parameters, newest)
            drained = training.get_args().curr_iteration + 1 in DRAINED
            state["older"] = None if drained else newest
            return losses

        return batch

    return get_forward_backward_func


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
