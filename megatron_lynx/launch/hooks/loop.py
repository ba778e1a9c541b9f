"""The training loop.

Replaces              `train` and `train_step` of `megatron.training.training` (globals, read by `pretrain` and by `train`).
Why                   when the loop begins the model is built, wrapped and loaded, and no step has run: the plan is installed here
                      and removed when the loop ends, so that evaluating, saving and a second `pretrain` in this process meet
                      Megatron's own objects.
Calls the original    once per call, with the arguments as they came (`train_step` returns more in later releases); a checked step
                      with another `forward_backward_func`.
Holds                 nothing; the installation is the launch's.
Passes through when   no plan was asked for. A script that only evaluates (`--skip-train`) never gets here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

from megatron_lynx.apply.hook import Claim
from megatron_lynx.launch.hosts.host import Told, around_step


def claims(told: Told) -> Iterator[Claim]:
    from megatron.training import training

    def around_loop(original: Any) -> Any:
        @wraps(original)
        def train(forward_step_func: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with told.training(model, optimizer):
                return original(forward_step_func, model, optimizer, *args, **kwargs)

        return train

    yield Claim(training, "train", around_loop, "is the training loop")
    yield Claim(training, "train_step", around_step(told), "is one step")
