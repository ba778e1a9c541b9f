"""Stock Megatron's own offloading on a testbed: one manager for the whole process, which learns its first step by heart.

first step    every module's tensors are counted, and a table of them is printed
later steps   must be the first one again: the same model, schedule and number of micro-batches
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager


def forget_offloaded() -> None:
    """Let the next step be the first one of another model."""
    PipelineOffloadManager.reset_instance()


@contextmanager
def without_its_table() -> Iterator[None]:
    """Nothing is printed while the block runs."""
    with redirect_stdout(io.StringIO()):
        yield
