"""How Megatron really cuts and fills up its buffers, on a rank. Megatron is imported inside, after the rank's stand-in."""

from __future__ import annotations

from megatron_lynx.config.job import Job

Buffer = tuple[int, int, int]
"""Numbers of all parameters, of the buffer, and buckets."""


def buffers(rank: int, jobs: list[Job]) -> list[list[Buffer]]:
    """Of each job, of every chunk, as pretraining wraps it."""
    from tests.instruments.groups import initialise

    initialise(jobs[0])
    return [_buffers(job) for job in jobs]


def _buffers(job: Job) -> list[Buffer]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.utils import get_model_config

    from tests.instruments.tiny_models import build_model

    chunks = build_model(job)
    count = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    size = count // job.overlap.buckets if job.overlap.buckets else job.overlap.bucket_parameters
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=job.overlap.gradients,
        use_distributed_optimizer=job.parallel.distributed_optimizer,
        bucket_size=size,
        pad_buckets_for_high_nccl_busbw=job.overlap.padded_buckets,
    )
    found = []
    for number, chunk in enumerate(chunks):
        wrapped = DistributedDataParallel(get_model_config(chunk), config, chunk, disable_bucketing=number > 0)
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
            own = sum(parameter.numel() for parameter in buffer.params)
            found.append((own, buffer.numel, len(buffer.buckets)))
    return found
