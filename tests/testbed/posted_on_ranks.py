"""What the tests of `tests.instruments.posted` run on ranks."""

from __future__ import annotations

from typing import Any

import torch

from megatron_lynx.config.job import Job
from tests.tiny_jobs import tiny_job


def ready(ranks: int) -> None:
    from tests.instruments.groups import initialise

    initialise(tiny_job("gpt", tensor=ranks))


def pending() -> int:
    from tests.instruments.posted import present_synchronize

    return len(present_synchronize().works._pending)


def wait_before_sending(rank: int) -> tuple[str, list[float]]:
    """The first rank posts a receive and synchronises; the second one sends behind that. What was said, and what arrived."""
    import torch.distributed as dist

    from megatron_lynx.errors import LynxError
    from tests.instruments.posted import synchronizing_within

    ready(2)
    said, received = "nothing", torch.full((3,), 9.0)
    if rank == 0:
        coming = dist.irecv(received, 1)
        try:
            with synchronizing_within(0.3):
                torch.cuda.synchronize()
        except LynxError as error:
            said = str(error)
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(3), 0)
    else:
        coming.wait()
    return said, received.tolist()


def post_and_synchronise(rank: int) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _coalescing_manager

    ready(2)
    left, ours = pending(), torch.tensor([1.0 + rank])
    received, summed, gathered, coalesced = torch.zeros(1), ours.clone(), torch.zeros(2), ours * 2
    works = [dist.isend(torch.ones(1), 1 - rank), dist.irecv(received, 1 - rank)]
    works += [dist.all_reduce(summed, async_op=True), dist.all_gather_into_tensor(gathered, ours, async_op=True)]
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(coalesced)
    posted = pending() - left
    assert posted == 5
    torch.cuda.synchronize()
    found = {"message": received, "sum": summed, "gathered": gathered, "coalesced": coalesced}
    again = all(work.wait() for work in works)
    manager.wait()
    return {name: tensor.tolist() for name, tensor in found.items()} | {"again": again, "pending": pending()}


def wait_for_nothing(rank: int) -> list[float]:
    """What is there behind a synchronisation, before the other rank sends."""
    import torch.distributed as dist

    from tests.instruments.posted import synchronizing_within

    ready(2)
    received = torch.zeros(1)
    coming = dist.irecv(received, 1 - rank)
    with synchronizing_within(0):
        torch.cuda.synchronize()
    found = received.tolist()
    dist.barrier()
    dist.send(torch.ones(1), 1 - rank)
    coming.wait()
    return found


def left_by_steps(rank: int, job: Job) -> int:
    """Works that nobody has waited for behind two steps."""
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.posted import synchronizing_within
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    left = pending()
    training = Training(job, build_model(job), ddp=True, optimizer="megatron", overlap_grad_reduce=True)
    with synchronizing_within(0):
        for step in range(2):
            training.step(synthetic_batches(job, step))
    return pending() - left
