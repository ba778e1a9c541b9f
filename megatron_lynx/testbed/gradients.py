"""Gradients of a rank's chunks by name, with and without Megatron's DistributedDataParallel around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config


def unwrapped(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The chunks without Megatron's DistributedDataParallel around them."""
    return [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in chunks]


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Parameters of all chunks by name, without the `module.` of wrappers; a chunk's number comes first if there are several."""
    prefix = "" if len(chunks) == 1 else "{}."
    return {
        prefix.format(index) + name.replace("module.", ""): parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def gradients(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Copies of all gradients by name: DDP's `main_grad` where there is one, else `grad`."""
    found = {}
    for name, parameter in named_parameters(chunks).items():
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is not None:
            found[name] = gradient.detach().clone()
    return found


def finalize_without_ddp(chunks: Sequence[torch.nn.Module], num_tokens: torch.Tensor | None = None, **_: Any) -> None:
    """The reductions of Megatron's `finalize_model_grads`, which refuses chunks without DDP, on plain `.grad`.

    Adds up norms' gradients over tensor-parallel ranks (each saw a slice of the sequence) and tied embeddings' over the
    first and last stage.
    """
    config = get_model_config(chunks[0])
    for name, parameter in named_parameters(chunks).items():
        if parameter.grad is None:
            continue
        per_head = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        if per_head or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)):
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
        if getattr(parameter, "shared_embedding", False) and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(parameter.grad, group=parallel_state.get_embedding_group())
