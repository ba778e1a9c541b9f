"""Stock Megatron's offloading of models one after another in one process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def stock_offloads() -> Iterator[None]:
    """One model is built and trained inside; the table that stock prints of it is not shown."""
    forget_offloaded()
    with redirect_stdout(io.StringIO()):
        yield


def forget_offloaded() -> None:
    """Reset stock's process-wide offload manager, which otherwise expects the steps of one model."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    PipelineOffloadManager.reset_instance()
