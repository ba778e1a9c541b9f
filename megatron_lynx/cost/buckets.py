"""Megatron's gradient buckets and their padding.

    one buffer    [ last layer's parameters ... | ... | ... embedding ]    in the order in which backward makes gradients
    one bucket    whole parameters, padded to a multiple that the data-parallel ranks share evenly

Only the buffer of the first stage's first chunk is cut, and only if reductions overlap passes. Padding is part of the parameter
and gradient buffers. Source: megatron-core 0.16.1 (`DistributedDataParallel`, `_ParamAndGradBuffer`) and Megatron-LM's
`get_model`. The alignment of each parameter to 64 numbers is not counted.
"""

from __future__ import annotations

from math import ceil, lcm

from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import Parameters, held_in_fp8, parameter_tensors
from megatron_lynx.kinds.experts.planning import expert_sharers

BUCKET_PARAMETERS, BUCKET_PARAMETERS_EACH = 40_000_000, 1_000_000
"""Default bucket size: the larger of a constant and a number per sharing rank (`DistributedDataParallel`)."""
ALIGNED, ALIGNED_FOR_BANDWIDTH = 128, 2**16


def bucket_parameters(job: Job, stage: int, parameters: Parameters, sharers: int) -> int:
    """Return the number of parameters per bucket. A bucket is at least as large as the mean parameter, which is not split."""
    asked = job.overlap.bucket_parameters
    if job.overlap.buckets is not None:
        asked = parameters.total // job.overlap.buckets
    least = max(1, parameters.total // max(1, parameter_tensors(job, stage).total))
    return max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_EACH * sharers) if asked is None else max(asked, least)


def buckets(job: Job, stage: int, parameters: Parameters) -> int:
    return sum(_buckets(job, stage, parameters, count, sharers) for count, sharers in _buffers(job, parameters))


def filled_numbers(job: Job, stage: int, parameters: Parameters) -> int:
    """Return the padding of all buffers, in numbers: exact for a buffer of one bucket, else an upper bound."""
    if not job.parallel.distributed_optimizer:
        return 0
    filled = 0
    for count, sharers in _buffers(job, parameters):
        multiple = lcm(
            sharers // job.parallel.optimizer_instances, ALIGNED, ALIGNED_FOR_BANDWIDTH if job.overlap.padded_buckets else 1
        )
        number, chunk_numbers = _buckets(job, stage, parameters, count, sharers), count // job.chunks
        cut = number - (job.chunks - 1)  # in the first chunk's buffer
        filled += (job.chunks - 1) * (-chunk_numbers % multiple) + (
            -chunk_numbers % multiple if cut == 1 else cut * (multiple - 1)
        )
    return filled


def _buffers(job: Job, parameters: Parameters) -> list[tuple[int, int]]:
    """Return (parameters, sharing ranks) of each buffer. Experts with their own data-parallel group have their own buffer
    (`use_expert_pgs` of 0.19; earlier, expert-parallel ones), and so have weights stored in FP8."""
    sharers, (linears, experts) = job.parallel.context * job.replicas, held_in_fp8(job, parameters)
    layout = job.parallel
    if not parameters.experts or (layout.expert, layout.expert_tensor_size) == (1, layout.tensor):
        in_fp8 = linears + experts
        return [*([(in_fp8, sharers)] if in_fp8 else []), (parameters.total - in_fp8, sharers)]
    held = [(linears, sharers)] if linears else []
    return [*held, (parameters.without_experts - linears, sharers), (parameters.experts, expert_sharers(job))]


def _buckets(job: Job, stage: int, parameters: Parameters, count: int, sharers: int) -> int:
    if not job.overlap.gradients or stage > 0:
        return job.chunks
    return job.chunks - 1 + max(1, ceil(count / job.chunks / bucket_parameters(job, stage, parameters, sharers)))
