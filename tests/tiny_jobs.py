"""Small jobs for tests. Imports neither torch nor Megatron."""

from __future__ import annotations

from typing import Any, Literal

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.job import Batch, Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Overlap, Parallel


def tiny_job(
    like: Literal["gpt", "llama"] = "gpt",
    *,
    userbuffers: bool = False,
    replicas: int = 1,
    microbatches: int = 2,
    micro: int = 2,
    **fields: Any,
) -> Job:
    """Return four layers of width 32, GPT-like (dropout 0.1, tied embeddings) or Llama-like. `fields`: of layout and model."""
    size = {"layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 64, "seq": 16, "attention": "unfused", "dtype": "fp32"}
    gpt = {"kv_groups": 4, "attention_dropout": 0.1, "hidden_dropout": 0.1, "tied_embeddings": True}
    llama = {"kv_groups": 2, "activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False}
    layout = Parallel(**{name: fields.pop(name) for name in Parallel.model_fields if name in fields})
    return Job(
        model=Model(**{**size, **(gpt if like == "gpt" else llama), **fields}),
        cluster=Cluster(name="testbed", device="cpu", memory_gib=8),
        gpus=layout.ranks * replicas,
        overlap=Overlap(userbuffers=userbuffers),
        parallel=layout,
        batch=Batch.model_validate({"micro": micro, "global": micro * microbatches * replicas}),
    )
