"""What one rank knows of the run that a plan is put in force for: model config, parallel_state, the modules themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch.nn import Module

from megatron_lynx.anatomy import HALVES, filling
from megatron_lynx.apply.hybrid import all_layers, is_hybrid, layers_in, refused_stack
from megatron_lynx.errors import Problem

TE_MODULE = "megatron.core.extensions.transformer_engine."
"""How the full names begin of Megatron's classes that wrap Transformer Engine's layers."""

LINEARS = "megatron.core.tensor_parallel.layers."
"""The same of its own linears."""

IDENTITY = "megatron.core.transformer.identity_op.IdentityOp"
"""What stands in the place of a norm that Transformer Engine makes inside a linear."""


OWNS_USERBUFFER = (
    "ub_overlap_ag_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_rs_fprop",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)
"""Attributes of Transformer Engine's linears that say that they own a userbuffer: they must be off unless the run says that it
has userbuffers, so that its plan is one for them."""


@dataclass(frozen=True)
class LiveRun:
    """One rank of a run, as Megatron built it."""

    chunks: tuple[Module, ...]
    """The GPTModels, unwrapped: one, or the virtual stages of an interleaved schedule in their order."""
    wrappers: tuple[Module, ...]
    """What they were wrapped in, outermost first."""
    config: Any
    tensor: int
    pipeline: int
    stage: int
    context: int
    tensor_group: Any
    expert: int
    """Ranks over which experts are shared out."""
    expert_group: Any
    replicas: int
    """Ranks that have the same weights, over which a distributed optimizer shares its state."""

    @property
    def layers(self) -> dict[int, Module]:
        """The rank's transformer layers by Megatron's layer number, chunk by chunk."""
        return {layer.layer_number: layer for chunk in self.chunks for layer in layers_in(chunk)}

    @property
    def all_layers(self) -> int:
        """How many layers the whole model has, counted as a plan does."""
        return all_layers(self.chunks[0]) if is_hybrid(self.chunks[0]) else int(self.config.num_layers)

    @property
    def uses_te(self) -> bool:
        """Whether the rank's first known linear is Transformer Engine's. `refused_layers` checks that all are alike."""
        paths = [item.path for half in HALVES for section in filling(half) for item in section.items if item.is_linear]
        linears = (module_at(layer, path) for layer in self.layers.values() for path in paths)
        return name_of(next(filter(None, linears), None)).startswith(TE_MODULE)

    @property
    def fp8(self) -> bool:
        """Whether linears multiply in FP8 or FP4, which only Transformer Engine's can."""
        return self.uses_te and recipe_of(self.config) is not None

    @property
    def groups_experts(self) -> bool:
        """Whether the linears of all of a rank's experts are one of Transformer Engine's."""
        experts = (module_at(layer, "mlp.experts.linear_fc1") for layer in self.layers.values())
        return any(name_of(linear).startswith(TE_MODULE) for linear in experts if linear is not None)

    @property
    def reduces_in_backward(self) -> bool:
        """Whether gradients are reduced over replicas while the last micro-batch's backward runs."""
        configs = (getattr(wrapper, "ddp_config", None) for wrapper in self.wrappers)
        return any(getattr(config, "overlap_grad_reduce", False) for config in configs)

    @property
    def userbuffers(self) -> bool:
        """Whether tensor-parallel linears exchange inside their GEMMs (--tp-comm-overlap)."""
        return self.tensor > 1 and bool(getattr(self.config, "tp_comm_overlap", False))

    def shards_of(self, sequence_parallel: bool) -> int:
        """Ranks among which the tokens of a sequence are cut outside of tensor-parallel linears."""
        return self.context * (self.tensor if sequence_parallel else 1)

    @property
    def group_size(self) -> int:
        """Micro-batches that one chunk takes before the next one has its turn."""
        return int(self.config.microbatch_group_size_per_vp_stage or self.pipeline)

    @property
    def combined(self) -> bool:
        """Whether a forward and a backward run in turns, node by node, while tokens of the other travel to experts."""
        return overlapped(self.config)

    @property
    def overlaps_exchanges(self) -> bool:
        """Whether messages between stages are waited for later than they are issued. Only interleaved schedules can."""
        return len(self.chunks) > 1 and bool(self.config.overlap_p2p_comm)


def recipe_of(config: Any) -> str | None:
    """By which recipe linears are asked to compute in FP8 or FP4; None: they are not."""
    bits = next((bits for bits in ("fp8", "fp4") if getattr(config, bits, None)), None)
    recipe = getattr(config, f"{bits}_recipe", None)
    return None if bits is None else str(getattr(recipe, "value", recipe))


def live_run(model: Any) -> LiveRun | list[Problem]:
    """The run that `model` (a module, or Megatron's list of chunks) is part of, or why it cannot be read."""
    both = [unwrapped(chunk) for chunk in (model if isinstance(model, (list, tuple)) else [model])]
    chunks = tuple(chunk for _, chunk in both)
    for chunk in chunks:
        if getattr(getattr(chunk, "decoder", None), "layers", None) is None:
            return [Problem("model", f"{type(chunk).__name__} without decoder.layers", "a megatron-core GPTModel")]
        if (problem := refused_stack(chunk)) is not None:
            return [problem]
    if len({id(chunk) for chunk in chunks}) < len(chunks) or not chunks:
        return [Problem("model", f"{len(chunks)} chunks, not all different", "the list of chunks as Megatron built it")]

    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        todo = "call initialize_model_parallel before; a plan does not go by decentralised groups"
        return [Problem("megatron.core.parallel_state", "no groups", "those that the model was built with", todo)]
    return LiveRun(
        chunks=chunks,
        wrappers=tuple(wrapper for wrappers, _ in both for wrapper in wrappers),
        config=chunks[0].config,
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        context=parallel_state.get_context_parallel_world_size(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_group=parallel_state.get_expert_model_parallel_group(check_initialized=False),
        replicas=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    )


def unwrapped(model: Module) -> tuple[tuple[Module, ...], Module]:
    """What a model is wrapped in, outermost first, and the GPTModel inside."""
    wrappers = []
    while not hasattr(model, "decoder") and isinstance(getattr(model, "module", None), Module):
        wrappers.append(model)
        model = model.module  # type: ignore[assignment]
    return tuple(wrappers), model


def module_at(layer: object, path: str) -> object:
    """The submodule of a layer at an attribute path; None where it has none."""
    return reduce(lambda module, name: getattr(module, name, None), path.split("."), layer)


def name_of(module: object) -> str:
    """The full name of an object's class: module and qualified name."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def overlapped(config: Any) -> bool:
    """Whether exchanges of experts run beside the computing of another micro-batch."""
    return bool(getattr(config, "overlap_moe_expert_parallel_comm", False))
