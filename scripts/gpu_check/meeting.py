"""Whether ranks reach each other at all: each of NCCL's collectives that Megatron uses, once to connect and once timed.

It is the first part of so many ranks, and short. Where it fails, parts of as many ranks and more are skipped: each of them would
wait for its time limit. One function for each collective, each waiting for its device, so that the stacks of a rank that hangs
name it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from megatron_lynx.config.job import Job
from scripts.gpu_check.part import Answer

VALUES = 2**16
"""Of each rank, in each collective."""


def meeting(rank: int, job: Job) -> Answer:
    """Runs inside `RankPool`."""
    from tests.instruments.groups import initialise

    initialise(job)
    wrong, took_s = list[str](), dict[str, float]()
    for name, collective in COLLECTIVES.items():
        right = collective(rank, job.gpus)
        begin_s = time.perf_counter()
        if not (right and collective(rank, job.gpus)):
            wrong.append(f"{name} of {job.gpus} ranks is not what they sent")
        took_s[name] = time.perf_counter() - begin_s
    slowest = max(took_s, key=lambda name: took_s[name])
    notes = () if wrong else (f"{len(took_s)} collectives, the slowest of them {slowest}",)
    return Answer(wrong=tuple(wrong), notes=notes if rank == 0 else (), figures={f"{name}, s": s for name, s in took_s.items()})


def all_reduce(rank: int, ranks: int) -> bool:
    tensor = _of(rank)
    dist.all_reduce(tensor)
    return _is(tensor, sum(range(ranks)))


def all_reduce_waited_for(rank: int, ranks: int) -> bool:
    """Compute runs on the device between its beginning and its wait."""
    tensor, other = _of(rank), _of(rank)
    work = dist.all_reduce(tensor, async_op=True)
    other.mul_(2)
    work.wait()
    return _is(tensor + other, sum(range(ranks)) + 2 * rank)


def all_gather(rank: int, ranks: int) -> bool:
    gathered = _of(0, ranks)
    dist.all_gather_into_tensor(gathered, _of(rank))
    return all(_is(part, number) for number, part in enumerate(gathered.chunk(ranks)))


def reduce_scatter(rank: int, ranks: int) -> bool:
    mine = _of(0)
    dist.reduce_scatter_tensor(mine, torch.cat([_of(number) for number in range(ranks)]))
    return _is(mine, rank * ranks)


def all_to_all(rank: int, ranks: int) -> bool:
    received = _of(0, ranks)
    dist.all_to_all_single(received, torch.cat([_of(rank)] * ranks))
    return all(_is(part, number) for number, part in enumerate(received.chunk(ranks)))


def broadcast(rank: int, ranks: int) -> bool:
    tensor = _of(rank)
    dist.broadcast(tensor, ranks - 1)
    return _is(tensor, ranks - 1)


def send_and_receive(rank: int, ranks: int) -> bool:
    """Each rank sends to the next one, and receives from the one before."""
    received = _of(0)
    ways = [(dist.isend, _of(rank), (rank + 1) % ranks), (dist.irecv, received, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, peer) for way, tensor, peer in ways]):
        work.wait()
    return _is(received, (rank - 1) % ranks)


def barrier(rank: int, ranks: int) -> bool:
    dist.barrier()
    return _is(_of(0), 0)


COLLECTIVES: Mapping[str, Callable[[int, int], bool]] = {
    "all-reduce": all_reduce,
    "all-reduce, waited for later": all_reduce_waited_for,
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
    "broadcast": broadcast,
    "send and receive": send_and_receive,
    "barrier": barrier,
}


def _of(value: int, times: int = 1) -> torch.Tensor:
    return torch.full((VALUES * times,), float(value), device="cuda")


def _is(tensor: torch.Tensor, value: int) -> bool:
    """Waits for the device."""
    return bool((tensor == value).all().item())
