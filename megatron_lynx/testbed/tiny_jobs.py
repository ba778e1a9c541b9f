"""Jobs small enough for tests. Nothing here imports torch or Megatron."""

from __future__ import annotations

from typing import Any, Literal

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.job import Batch, Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.overlap import Overlap
from megatron_lynx.config.parallel import ContextExchange, Parallel


def tiny_job(
    like: Literal["gpt", "llama"] = "gpt",
    *,
    tensor: int = 1,
    context: int = 1,
    context_exchange: ContextExchange = "p2p",
    expert: int = 1,
    expert_tensor: int | None = None,
    pipeline: int = 1,
    partition: tuple[int, ...] | None = None,
    layers_per_chunk: int | None = None,
    microbatch_group: int | None = None,
    sequence_parallel: bool = False,
    userbuffers: bool = False,
    replicas: int = 1,
    microbatches: int = 2,
    micro: int = 2,
    distributed_optimizer: bool = False,
    **model: Any,
) -> Job:
    """A job small enough for tests: four layers of width 32, GPT-like (dropout 0.1, tied embeddings) or Llama-like.

    `model` replaces fields of `config.model.Model`.
    """
    size = {"layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 64, "seq": 16, "attention": "unfused", "dtype": "fp32"}
    gpt = {"kv_groups": 4, "attention_dropout": 0.1, "hidden_dropout": 0.1, "tied_embeddings": True}
    llama = {"kv_groups": 2, "activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False}
    layout = Parallel(
        tensor=tensor,
        context=context,
        context_exchange=context_exchange,
        expert=expert,
        expert_tensor=expert_tensor,
        pipeline=pipeline,
        partition=partition,
        layers_per_chunk=layers_per_chunk,
        microbatch_group=microbatch_group,
        sequence_parallel=sequence_parallel,
        distributed_optimizer=distributed_optimizer,
    )
    return Job(
        model=Model(**{**size, **(gpt if like == "gpt" else llama), **model}),
        cluster=Cluster(name="testbed", device="cpu", memory_gib=8),
        gpus=layout.ranks * replicas,
        overlap=Overlap(userbuffers=userbuffers),
        parallel=layout,
        batch=Batch.model_validate({"micro": micro, "global": micro * microbatches * replicas}),
    )
