"""The testbed's models with the same weights in every layout, and with an attention among ranks where Megatron has none.

    job ──> one GPTModel per chunk ──> weights drawn by global name

Two builds are equal in every bit.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module

from megatron_lynx.anatomy import DENSE
from megatron_lynx.config.job import Job
from megatron_lynx.testbed import tiny_models
from tests.instruments.context_attention import ContextAttention, TeContextAttention

ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Variables in which Megatron passes the attention kernel to Transformer Engine. It refuses a model that differs from their
values, which an earlier model of this process may have set."""


def build_model(job: Job, *, seed: int = 1234, **settings: Any) -> list[GPTModel | Float16Module]:
    """As the testbed's. Weights depend only on `seed` and names. RNG states change, so seed them afterwards."""
    for variable in ATTENTION:
        os.environ.pop(variable, None)
    drawn: dict[str, Any] = {} if "weights_of" in settings else {"draw": partial(draw_weights, seed=seed)}
    with patch.object(tiny_models, "block_spec", partial(with_core_attention, job, tiny_models.block_spec)):
        return tiny_models.build_model(job, **drawn, **settings)


def with_core_attention(job: Job, usual: Any, *args: Any) -> Any:
    """Return the spec of layers with a core attention for context parallelism, unless Transformer Engine's kernels are there."""
    block, te = usual(*args), job.model.uses_te
    if job.parallel.context > 1 and not (te and torch.cuda.is_available()):
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = TeContextAttention if te else ContextAttention
    return block


SAME = {f"{section.item('column_parallel').path}.layer_norm_": f"{section.norm}." for section in DENSE.values()}
"""Names of Transformer Engine's fused norms, and of the same parameters in local layers."""

KEPT = "_high_precision_init_val"
"""Attribute with the original values of an FP8 weight, until the optimizer has made its main parameter."""


@torch.no_grad()
def draw_weights(chunk: GPTModel, seed: int) -> None:
    """Overwrite every parameter with its slice of a tensor drawn from `seed` and its global name, on the parameter's device."""
    for name, parameter in chunk.named_parameters():
        name, (ranks, rank) = global_name(chunk, name), _shard_of(name)
        # A gated delta net's convolution has no partition_dim. SwiGLU's first GEMM has two strides, gate and up: each is split.
        dim, strides = getattr(parameter, "partition_dim", 0), getattr(parameter, "partition_stride", 1)
        shape, split = list(parameter.shape), getattr(parameter, "tensor_model_parallel", False)
        if split:
            shape[dim] *= ranks
        of_name = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
        generator = torch.Generator(parameter.device).manual_seed(of_name)
        weights = torch.randn(shape, generator=generator, device=parameter.device) * 0.05
        if name.endswith("norm.weight"):
            weights += 1
        if split:
            weights = torch.cat([part.chunk(ranks, dim)[rank] for part in weights.chunk(strides, dim)], dim)
        if hasattr(parameter, KEPT):
            if (amax := getattr(parameter._quantizer, "amax", None)) is not None:
                amax.zero_()  # computed from uninitialized memory
            setattr(parameter, KEPT, weights.to(parameter.dtype).cpu())
        parameter.copy_(weights)


def global_name(chunk: GPTModel, name: str) -> str:
    """Return a parameter's name in the unsplit model of local layers, whose layers and experts are counted over all ranks."""
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    for fused, local in SAME.items():
        name = name.replace(fused, local)
    name = re.sub(r"(?<=\.local_experts\.)\d+", lambda index: str(_first_expert(chunk) + int(index[0])), name)
    name = re.sub(r"(?<=\.mlp\.experts\.)(?!local_experts)", lambda _: f"from_{_first_expert(chunk)}.", name)
    return re.sub(r"(?<=^decoder\.layers\.)\d+", lambda index: str(chunk.decoder.layers[int(index[0])].layer_number - 1), name)


def _first_expert(chunk: GPTModel) -> int:
    ranks, rank = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
    return int(rank) * (int(chunk.config.num_moe_experts or 0) // int(ranks))


def _shard_of(name: str) -> tuple[int, int]:
    if ".mlp.experts." in name:
        return parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank()
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
