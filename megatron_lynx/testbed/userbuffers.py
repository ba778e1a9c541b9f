"""Userbuffers for a job of the testbed, as a launch with --tp-comm-overlap has them made before its model is built."""

from __future__ import annotations

from typing import Any

import torch

from megatron_lynx.config.job import Job


def make_userbuffers(job: Job, dtype: torch.dtype) -> None:
    """Have Transformer Engine make them for one micro-batch of the job, in place of those that there are."""
    base = _base()
    base.destroy_ub()
    quantized = base.UserBufferQuantizationMode.NONE if job.model.fp8 is None else base.UserBufferQuantizationMode.FP8
    base.initialize_ub(
        shape=[job.model.seq * job.batch.micro // job.parallel.context, job.model.hidden],
        tp_size=job.parallel.tensor,
        quantization_modes=[quantized],
        dtype=dtype,
        bootstrap_backend="gloo",
    )


def exchanges() -> dict[str, int]:
    """How many exchanges each userbuffer has seen, by its name."""
    made = _base()._ub_communicators or {}
    return {name if isinstance(name, str) else name[0]: buffer.exchanges for name, buffer in made.items()}


def _base() -> Any:
    from transformer_engine.pytorch.module import base

    return base
