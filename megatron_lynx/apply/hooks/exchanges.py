"""The windows of experts that are shared out over ranks.

Replaces              `torch.distributed.all_to_all_single`, which Megatron's alltoall dispatcher calls in both passes.
Why                   tokens travel to their experts and back, and compute waits for them.
Calls the original    once per call; in a window asynchronously, and waited for here where the caller wanted to wait.
Holds                 the group of ranks over which experts are shared out.
Passes through when   nothing runs in the window, the group is another one (context parallelism's, say), or the call is made
                      outside a half of experts and its backward. Installed only where the plan names such windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.hooks.collectives import issued
from megatron_lynx.runtime.engine import Engine


def claims(engine: Engine, group: Any) -> Iterator[Claim]:
    def in_window(original: Any) -> Any:
        @wraps(original)
        def exchange(*args: Any, **kwargs: Any) -> Any:
            window = engine.waits.window(exchange=True) if kwargs.get("group") is group and engine.in_half else None
            return issued(window, original, *args, **kwargs)

        return exchange

    yield Claim(torch.distributed, "all_to_all_single", in_window, "brings tokens to experts, and back")
