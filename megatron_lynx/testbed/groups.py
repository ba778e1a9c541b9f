"""Process groups and seeds of the ranks, as a launch script makes them: torch.distributed, Megatron's parallel_state, RNG.

    join_alone(ranks)    first, in a process without other ranks: torch's "fake" backend replaces them
    initialise(job)      torch.distributed (once), the groups of this job's layout, seeds

All groups of a rank share one gloo device, whose thread polls a hundred times per second.
"""

from __future__ import annotations

import gc
import os
import random
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_lynx.config.job import Job

SEED = 1234

THREADS = 2
"""Threads for a group's collectives, PyTorch's default."""


def initialise(job: Job) -> None:
    """Join the job (environment as set by torchrun), make Megatron's groups for its layout, and seed. May be called again."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        _leave_imports_to_themselves()
        share_one_device()
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if parallel_state.is_initialized():
        _drop_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.parallel.tensor,
        pipeline_model_parallel_size=job.parallel.pipeline,
        context_parallel_size=job.parallel.context,
        expert_model_parallel_size=job.parallel.expert,
        expert_tensor_parallel_size=job.parallel.expert_tensor_size,
        num_distributed_optimizer_instances=job.parallel.optimizer_instances,
        create_gloo_process_groups=dist.get_backend() != "fake",
    )
    parallel_state.set_virtual_pipeline_model_parallel_world_size(job.chunks if job.chunks > 1 else None)
    seed_random_numbers(SEED)


def join_alone(ranks: int) -> None:
    """Make this process rank 0 of a job without other ranks: collectives and messages leave their buffers unchanged."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (makes the backend known)

    _leave_imports_to_themselves()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())  # type: ignore[attr-defined]


def _leave_imports_to_themselves() -> None:
    """Exclude imported objects from garbage collection, which otherwise takes 0.2 s longer each time."""
    gc.collect()
    gc.freeze()


def _drop_groups() -> None:
    """Destroy all groups but the world. `destroy_model_parallel` only forgets its groups, some forty, each with threads."""
    parallel_state.destroy_model_parallel()
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def seed_random_numbers(seed: int) -> None:
    """Seed every generator as Megatron's training does. Its tracker stays the same object, which attention modules keep."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def share_one_device() -> None:
    if not issubclass(c10d.ProcessGroupGloo, _OnOneDevice):
        c10d.ProcessGroupGloo = _OnOneDevice  # type: ignore[misc]


class _OnOneDevice(c10d.ProcessGroupGloo):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
        """`more`: options of later PyTorch releases by name (`enable_reconfigure` from 2.14 on)."""
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads, options._timeout = [_device()], THREADS, timeout
        for name, value in more.items():
            setattr(options, name, value)
        super().__init__(store, rank, size, options)


@cache
def _device() -> Any:
    return c10d.ProcessGroupGloo.create_device(interface=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
