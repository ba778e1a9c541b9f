"""The moment from which ranks can talk.

Replaces              `_initialize_distributed` of `megatron.training.initialize` (a global, read by `initialize_megatron`).
Why                   a plan that is wrong, or that one rank cannot read, is told before a model is built, by all ranks together.
                      Megatron has validated its arguments by then, from the command line or from YAML.
Calls the original    once per call, with the arguments as they came (they differ by release).
Holds                 nothing.
Passes through when   no plan was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

from megatron_lynx.apply.hook import Claim
from megatron_lynx.launch.hosts.host import Told


def claims(told: Told) -> Iterator[Claim]:
    from megatron.training import initialize
    from megatron.training.global_vars import get_args

    def hooked(original: Any) -> Any:
        @wraps(original)
        def _initialize_distributed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            told.prepare(get_args())
            return result

        return _initialize_distributed

    yield Claim(initialize, "_initialize_distributed", hooked, "starts torch.distributed")
