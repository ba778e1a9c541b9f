"""Megatron's NVTX ranges around a replay (no hook: they are only put back).

A replay stops early, between a push and its pop. What was pushed since is popped, so that the next pop finds its own message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_as_they_were() -> Iterator[None]:
    from megatron.core import utils

    depth = len(utils._nvtx_range_messages)
    try:
        yield
    finally:
        while len(utils._nvtx_range_messages) > depth:
            utils.nvtx_range_pop(utils._nvtx_range_messages[-1])
