"""Parameters of experts on one rank: `expert` ranks hold all experts of a layer, each cut among `expert_tensor` ranks.

    E / expert experts   each (fc1 + fc2) h H / expert_tensor, and its biases     shared by ranks with the same: expert data
    router               E h, on every rank
    shared experts       an MLP's, cut among `tensor` ranks

As megatron-core builds them (`SequentialMLP`, `TopKRouter`, `SharedExpertMLP`) and groups them
(`parallel_state.initialize_model_parallel`). Optimizer state of experts is sharded over their own, smaller, data-parallel group.
"""

from __future__ import annotations

from megatron_lynx.config.experts import Experts
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model


def expert_sharers(job: Job) -> int:
    """Ranks of one stage that hold the same experts (expert data parallel)."""
    layout = job.parallel
    return job.gpus // (layout.expert_tensor_size * layout.expert * layout.pipeline)


def own_expert_parameters(job: Job) -> int:
    """Experts of one layer on one rank."""
    experts, tensor = _experts(job.model), job.parallel.expert_tensor_size
    return experts.count // job.parallel.expert * (expert_matrices(job.model) // tensor + _biases(job.model, tensor))


def beside_experts(job: Job) -> int:
    """What every rank of a layer of experts holds besides: router and shared experts."""
    experts, model = _experts(job.model), job.model
    return model.hidden * experts.count + _mlp(model, experts.shared_ffn) // job.parallel.tensor


def expert_matrices(model: Model) -> int:
    """Weights of one whole expert."""
    return _mlp(model, _experts(model).ffn)


def weights_passed(model: Model) -> int:
    """Weights of an expert layer's MLP half that one token is multiplied with."""
    experts = _experts(model)
    return experts.per_token * expert_matrices(model) + _mlp(model, experts.shared_ffn) + model.hidden * experts.count


def _mlp(model: Model, ffn: int) -> int:
    return model.hidden * ffn * (3 if model.activation == "swiglu" else 2)


def _biases(model: Model, tensor: int) -> int:
    if not model.bias:
        return 0
    ffn = _experts(model).ffn
    return (2 * ffn if model.activation == "swiglu" else ffn) // tensor + model.hidden


def _experts(model: Model) -> Experts:
    assert model.experts is not None, "asked only of models with experts"
    return model.experts
