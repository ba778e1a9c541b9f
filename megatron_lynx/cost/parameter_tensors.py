"""How many parameters, as tensors, a rank holds: copies and launches of an update go by them, not by their elements.

layer     4 weights, 2 norms       each weight a bias, and each LayerNorm, if the model has them
experts   a router, 2 weights of each of the rank's experts, 2 of the shared ones, in place of the MLP's 2
ends      embeddings; the last norm, and the head if it is not the embedding itself
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lynx.config.job import Job


class ParameterTensors(NamedTuple):
    """Tensors of one rank."""

    weights: int
    vectors: int
    """Biases and norms."""

    @property
    def total(self) -> int:
        return self.weights + self.vectors


def parameter_tensors(job: Job, stage: int) -> ParameterTensors:
    model, layers, experts = job.model, job.layers_on(stage), job.experts_on(stage)
    first, last = stage == 0, stage == job.parallel.pipeline - 1
    norm = 2 if model.norm == "layernorm" else 1
    linears = 4 * layers
    projections = 0 if model.latent is None else layers * (2 + model.latent.compressed)  # in place of linear_qkv, and more
    if model.experts is not None:
        shared = 2 if model.experts.shared_ffn else 0
        linears += experts * (2 * (model.experts.count // job.parallel.expert) + shared - 2)
    inner = 2 if model.latent is None or model.latent.compressed else 1
    norms = (2 * layers + last + (inner * layers if model.qk_norm else 0)) * norm
    ends = first * (2 if model.position == "learned" else 1) + last * (not (first and model.tied_embeddings))
    routers = experts
    biased = linears - (layers if model.latent is not None else 0)
    return ParameterTensors(weights=linears + projections + ends + routers, vectors=norms + (biased if model.bias else 0))
