"""Weights of the testbed's models: the same in every build and layout.

    seed, name in the unsplit model ──draw──> whole parameter ──> this rank's slice

Megatron seeds weights by rank. Here each parameter is drawn whole, seeded by its name in the unsplit model, and each rank
takes its slice: two builds are equal in every bit, and layouts can be compared with each other up to rounding. So can the
two kinds of layers, whose norms have other names (`SAME`). Experts are cut by groups of their own, and counted over all ranks;
only of those that are held in one parameter (grouped GEMMs) each rank draws its own.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_lynx.anatomy import DENSE
from megatron_lynx.kinds.latent.section import KV_NORM, KV_UP, Q_NORM, Q_UP

SAME = {f"{section.item('column_parallel').path}.layer_norm_": f"{section.norm}." for section in DENSE.values()} | {
    f"{linear.path}.layer_norm_": f"{norm.path}." for linear, norm in ((Q_UP, Q_NORM), (KV_UP, KV_NORM))
}
"""Names of Transformer Engine's fused norms, and of the same parameters in local layers."""

KEPT = "_high_precision_init_val"
"""Where a weight that is held in FP8 keeps what it was before, until the optimizer has made its main parameter of it."""


@torch.no_grad()
def draw_weights(chunk: GPTModel, seed: int) -> None:
    """Overwrite every parameter with its slice of a tensor drawn, on the parameter's device, from `seed` and its global name."""
    for name, parameter in chunk.named_parameters():
        name, shard = global_name(chunk, name), shard_of(name)
        of_name = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
        generator = torch.Generator(parameter.device).manual_seed(of_name)
        whole = torch.randn(whole_shape(parameter, shard), generator=generator, device=parameter.device) * 0.05
        own = slice_of_rank(parameter, whole + 1 if name.endswith("norm.weight") else whole, shard)
        if hasattr(parameter, KEPT):
            _forget_built(parameter)
            setattr(parameter, KEPT, own.to(parameter.dtype).cpu())
        parameter.copy_(own)


def _forget_built(weight: torch.nn.Parameter) -> None:
    """A weight in FP8 remembers the largest magnitude of what it was built with, which is memory that nobody has written."""
    amax = getattr(weight._quantizer, "amax", None)  # type: ignore[attr-defined]
    if amax is not None:
        amax.zero_()


def global_name(chunk: GPTModel, name: str) -> str:
    """A parameter's name in the unsplit model of local layers: layers counted over all stages, experts over all ranks, one name
    for tied embeddings."""
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    for fused, own in SAME.items():
        name = name.replace(fused, own)
    name = re.sub(r"(?<=\.local_experts\.)\d+", lambda index: str(_first_expert(chunk) + int(index[0])), name)
    name = re.sub(r"(?<=\.mlp\.experts\.)(?!local_experts)", lambda _: f"from_{_first_expert(chunk)}.", name)
    return re.sub(r"(?<=^decoder\.layers\.)\d+", lambda index: str(chunk.decoder.layers[int(index[0])].layer_number - 1), name)


def _first_expert(chunk: GPTModel) -> int:
    """The number of this rank's first expert in a layer."""
    ranks, rank = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
    return int(rank) * (int(chunk.config.num_moe_experts or 0) // int(ranks))


class Shard(NamedTuple):
    """Into how many parts a parameter is cut, and which of them this rank holds."""

    ranks: int
    rank: int


def shard_of(name: str) -> Shard:
    """How a parameter of this name is cut: experts have a group of their own."""
    if ".mlp.experts." in name:
        return Shard(parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank())
    return Shard(parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank())


def whole_shape(parameter: torch.nn.Parameter, shard: Shard) -> list[int]:
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[getattr(parameter, "partition_dim", 0)] *= shard.ranks  # a gated delta net's convolution does not say
    return shape


def slice_of_rank(parameter: torch.nn.Parameter, whole: torch.Tensor, shard: Shard) -> torch.Tensor:
    """This rank's part. SwiGLU's first GEMM has two strides, gate and up, each cut on its own."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim, strides = getattr(parameter, "partition_dim", 0), getattr(parameter, "partition_stride", 1)
    return torch.cat([part.chunk(shard.ranks, dim)[shard.rank] for part in whole.chunk(strides, dim)], dim)


def share_weights(chunk: torch.nn.Module, like: torch.nn.Module) -> None:
    """Give a chunk the parameters of another one of the same make: the same objects, so gradients are shared as well."""
    for place, module in chunk.named_modules():
        other = like.get_submodule(place)
        for name in list(module._parameters):
            setattr(module, name, other._parameters[name])
