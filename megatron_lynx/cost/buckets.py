"""Into what buckets Megatron cuts gradients, and with how many numbers that belong to nobody it fills them up.

    one buffer    [ last layer's parameters ... | ... | ... embedding ]    in the order in which backward makes gradients
    one bucket    so many parameters, whole ones; then up to a multiple of what data-parallel ranks can share evenly

Buckets are cut where reductions overlap passes, and of those buffers only that of the first stage's first chunk; every other
buffer is one bucket. Filled up are the distributed optimizer's: to a multiple of the ranks that share them and of 128 numbers,
with `--ddp-pad-buckets-for-high-nccl-busbw` of 65536. What is filled is a part of the buffers of parameters and of gradients.

As read in megatron-core 0.16.1 (`DistributedDataParallel`, `_ParamAndGradBuffer`) and in Megatron-LM's `get_model`. Parameters
begin at multiples of 64 numbers, which only counts in models whose sizes are none: it is left out.
"""

from __future__ import annotations

from math import ceil, lcm

from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import Parameters, held_in_fp8, parameter_tensors
from megatron_lynx.kinds.experts.planning import expert_sharers

BUCKET_PARAMETERS, BUCKET_PARAMETERS_EACH = 40_000_000, 1_000_000
"""A bucket has so many parameters, or so many for each rank that shares them if that is more (`DistributedDataParallel`), unless
a job says how many."""
ALIGNED, ALIGNED_FOR_BANDWIDTH = 128, 2**16
"""Of how many numbers a bucket is a multiple."""


def bucket_parameters(job: Job, stage: int, parameters: Parameters, sharers: int) -> int:
    """Of parameters that so many ranks share, how many a bucket has. What is not divided is one parameter: a bucket has at least
    the mean size of those."""
    asked = job.overlap.bucket_parameters
    if job.overlap.buckets is not None:
        asked = parameters.total // job.overlap.buckets
    least = max(1, parameters.total // max(1, parameter_tensors(job, stage).total))
    return max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_EACH * sharers) if asked is None else max(asked, least)


def buckets(job: Job, stage: int, parameters: Parameters) -> int:
    """How many a stage's buffers are cut into, all together."""
    return sum(_buckets(job, stage, parameters, count, sharers) for count, sharers in _buffers(job, parameters))


def filled_numbers(job: Job, stage: int, parameters: Parameters) -> int:
    """Numbers that belong to no parameter, in all buffers: exactly, where a buffer is one bucket; else the most there can be."""
    if not job.parallel.distributed_optimizer:
        return 0
    filled = 0
    for count, sharers in _buffers(job, parameters):
        multiple = lcm(
            sharers // job.parallel.optimizer_instances, ALIGNED, ALIGNED_FOR_BANDWIDTH if job.overlap.padded_buckets else 1
        )
        number, each = _buckets(job, stage, parameters, count, sharers), count // job.chunks
        cut = number - (job.chunks - 1)  # of the first chunk's buffer
        filled += (job.chunks - 1) * (-each % multiple) + (-each % multiple if cut == 1 else cut * (multiple - 1))
    return filled


def _buffers(job: Job, parameters: Parameters) -> list[tuple[int, int]]:
    """Parameters, and the ranks that share them: experts that other ranks share than the rest have buffers of their own
    (`use_expert_pgs` of 0.19; before, those that are shared out), and so have weights that are held in FP8."""
    sharers, (linears, experts) = job.parallel.context * job.replicas, held_in_fp8(job, parameters)
    layout = job.parallel
    if not parameters.experts or (layout.expert, layout.expert_tensor_size) == (1, layout.tensor):
        in_fp8 = linears + experts
        return [*([(in_fp8, sharers)] if in_fp8 else []), (parameters.total - in_fp8, sharers)]
    held = [(linears, sharers)] if linears else []
    return [*held, (parameters.others - linears, sharers), (parameters.experts, expert_sharers(job))]


def _buckets(job: Job, stage: int, parameters: Parameters, count: int, sharers: int) -> int:
    if not job.overlap.gradients or stage > 0:
        return job.chunks
    return job.chunks - 1 + max(1, ceil(count / job.chunks / bucket_parameters(job, stage, parameters, sharers)))
