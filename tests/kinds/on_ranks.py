"""What the tests of a new kind run on a rank. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.errors import PlanMismatch
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.profile import SavedTensor
from tests.kinds.gated.registration import registered
from tests.transparency.trials import Outcome, Trial, compare_with_stock


@contextmanager
def gated_layers() -> Iterator[None]:
    """The kind is known, and the testbed's models have it."""
    from megatron_lynx.testbed import tiny_models
    from tests.kinds.gated.layer import gated

    usual = tiny_models.block_spec
    with registered(), patch.object(tiny_models, "block_spec", lambda *args: gated(usual(*args))):
        yield


def compare(rank: int, job: Job, plans: list[Plan], trial: Trial) -> list[Outcome]:
    with gated_layers():
        return compare_with_stock(rank, job, plans, trial)


def refused(rank: int, job: Job, plan: Plan) -> str:
    """Why a plan for the usual attention is not installed on gated layers."""
    from megatron_lynx.apply.installation import install
    from tests.apply.on_ranks import trained

    with gated_layers():
        training = trained(job)
        try:
            install(training.chunks, plan)
        except PlanMismatch as mismatch:
            return str(mismatch)
    return "nothing"


Measured = tuple[tuple[SavedTensor, ...], dict[str, int], int, int]
"""The blocks that an attention half keeps, FLOPs of its items, and the model's parameters: numbers, and tensors."""


def measured(rank: int, job: Job) -> Measured:
    with gated_layers():
        return _measured(job)


def measured_delta_net(rank: int, job: Job) -> Measured:
    from tests.transparency.opaque_layers import delta_nets

    with delta_nets(job):
        return _measured(job)


def _measured(job: Job) -> Measured:
    """Of the first layer."""
    from megatron_lynx.apply.hooks.sites import places_of
    from megatron_lynx.profiler.measured import blocks_of
    from megatron_lynx.profiler.timing import HalfRun, item_flops
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model

    initialise(job)
    [chunk] = build_model(job)
    layer: Any = chunk.decoder.layers[0]
    hidden = torch.randn(job.model.seq, job.batch.micro, job.model.hidden)
    section = job.model.sections(1)[0]
    run = HalfRun(section, getattr(layer, section.method), {"attention_mask": None}, hidden, places_of(section, layer))
    sizes = [parameter.numel() for parameter in chunk.parameters()]
    return blocks_of(run)[0], item_flops(run), sum(sizes), len(sizes)


def measured_sparse(rank: int, job: Job) -> Measured:
    from tests.transparency.sparse_layers import sparse_attention

    with sparse_attention(job):
        return _measured(job)
