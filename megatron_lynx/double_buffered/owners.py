"""Finds every tensor of Megatron's that shares memory with weights or gradients, and must follow when they move.

    weights
parameter.data                          all of them
the flat buffer and its buckets         of DDP with the distributed optimizer, which gathers updated weights into them
a rank's shards of the buckets          as DDP remembers them between gathers
a rank's shards of the parameters       as the distributed optimizer holds them: fp32 ones it updates in place
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

SHARDS = ("shard_float16_groups", "shard_fp32_groups")
"""Attributes of Megatron's distributed optimizer that hold groups of views into the flat buffer."""


def owners(chunk: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """The tensors that may share memory with weights. Gathered at each call: DDP makes some of them when it first needs them."""
    found = [*chunk.parameters(), *_of_ddp(chunk)]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        found += [tensor for name in SHARDS for group in getattr(part, name, []) for tensor in group]
    return (tensor for tensor in found if tensor is not None)


def _of_ddp(chunk: Any) -> Iterator[torch.Tensor | None]:
    if not hasattr(chunk, "bucket_groups"):
        return
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        yield buffer.param_data
        yield from (bucket.param_data for bucket in buffer.buckets)
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        yield from (shard for shards in group.cached_param_buffer_shard_list for shard in shards or ())


def gradient_owners(chunk: Any) -> Iterator[torch.Tensor]:
    """The tensors that share memory with the gradient buffers of a chunk in DDP, gathered at each call as well."""
    yield from (parameter.main_grad for parameter in chunk.parameters() if hasattr(parameter, "main_grad"))
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        yield buffer.grad_data
        yield from (bucket.grad_data for bucket in buffer.buckets)
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        yield from (shard for shards in group.cached_grad_buffer_shard_list for shard in shards or ())
