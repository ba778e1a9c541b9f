"""How many parameters a rank holds, by what they belong to, and the bytes that each brings with it.

    bf16    parameter 2   gradient 4 (accumulated in fp32)   optimizer 4 + 4 + 4: fp32 copy, two moments
    fp32    parameter 4   gradient 4                         optimizer 4 + 4: two moments
With the distributed optimizer the last column is shared by all ranks that hold the same parameters: context x data parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model

GRADIENT_BYTES = 4
OPTIMIZER_BYTES = {"bf16": 12, "fp32": 8}


@dataclass(frozen=True)
class Parameters:
    """Counts on one rank of one stage."""

    matrices: int
    """The weights of the layers' linears."""
    vectors: int
    """Biases and norms, the final norm included."""
    embedding: int
    """Word and learned position embeddings."""
    head: int
    """The output projection, where it is not the embedding itself on the same stage."""

    @property
    def total(self) -> int:
        return self.matrices + self.vectors + self.embedding + self.head


def stage_parameters(job: Job, stage: int) -> Parameters:
    """A pipelined model with tied embeddings holds them on both ends, as Megatron does."""
    model, tensor, layers = job.model, job.parallel.tensor, job.layers_on(stage)
    first, last = stage == 0, stage == job.parallel.pipeline - 1
    words = model.vocab * model.hidden // tensor
    positions = model.seq * model.hidden if model.position == "learned" else 0
    return Parameters(
        matrices=layers * layer_matrices(model) // tensor,
        vectors=layers * _layer_vectors(model, tensor) + last * _norm(model),
        embedding=first * (words + positions),
        head=last * (0 if first and model.tied_embeddings else words),
    )


def layer_matrices(model: Model) -> int:
    """Weights of one layer's four linears over all tensor-parallel ranks: (2 + 2g/a)h² + 3hH with SwiGLU, else 2hH."""
    return model.hidden * (model.qkv_width + model.hidden + model.fc1_width + model.ffn)


def parameter_bytes(job: Job, count: int) -> int:
    return count * job.model.element_bytes


def gradient_bytes(count: int) -> int:
    return count * GRADIENT_BYTES


def optimizer_bytes(job: Job, count: int) -> int:
    """This rank's share, rounded up."""
    sharers = job.parallel.context * job.replicas if job.parallel.distributed_optimizer else 1
    return -(-count * OPTIMIZER_BYTES[job.model.dtype] // sharers)


def _layer_vectors(model: Model, tensor: int) -> int:
    row_parallel, column_parallel = 2 * model.hidden, (model.qkv_width + model.fc1_width) // tensor
    return 2 * _norm(model) + (row_parallel + column_parallel if model.bias else 0)


def _norm(model: Model) -> int:
    return model.hidden * (2 if model.norm == "layernorm" else 1)
