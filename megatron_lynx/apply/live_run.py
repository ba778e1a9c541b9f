"""One rank of a live run: model config, parallel_state, modules.

A hybrid stack (Megatron's HybridModel) splits a GPT layer into two layers, each with one half that passes through: with pattern
*-*- its layers 1 and 2 are a plan's layer 1. A Mamba layer is a half, too, and a half may be missing (`kinds.opaque`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter
from typing import Any, TypeVar

from torch import distributed
from torch.nn import Module

from megatron_lynx.anatomy import HALVES, Half, filling
from megatron_lynx.anatomy.stack import NEEDED, layers_of, segments_of, unknown_in
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.captured import BESIDE, CAPTURED_MODULES, CapturedModule, refused_capture
from megatron_lynx.kinds.dense.section import LINEARS

TE_MODULE = "megatron.core.extensions.transformer_engine."


@dataclass(frozen=True)
class LiveRun:
    chunks: tuple[Module, ...]
    """The GPTModels, unwrapped: one, or the virtual stages of an interleaved schedule in their order."""
    wrappers: tuple[Module, ...]
    """Their wrappers, outermost first."""
    config: Any
    tensor: int
    pipeline: int
    stage: int
    context: int
    tensor_group: Any
    expert: int
    """Ranks among which experts are distributed."""
    expert_group: Any
    replicas: int
    """Ranks with the same weights, which share a distributed optimizer's state."""

    @property
    def layers(self) -> dict[int, Module]:
        return {layer.layer_number: layer for chunk in self.chunks for layer in layers_in(chunk)}

    @property
    def all_layers(self) -> int:
        if not is_hybrid(self.chunks[0]):
            return int(self.config.num_layers)
        return sum(map(len, map(layers_of, _segments(self.chunks[0]))))

    @property
    def uses_te(self) -> bool:
        """Whether the rank's first known linear is Transformer Engine's. `refused_layers` checks that all are alike."""
        paths = [item.path for half in HALVES for section in filling(half) for item in section.items if item.is_linear]
        linears = (module_at(layer, path) for layer in self.layers.values() for path in paths)
        return name_of(linear_in(next(filter(None, linears), None))).startswith(TE_MODULE)

    @property
    def adapted(self) -> tuple[str, ...]:
        modules = (named for layer in self.layers.values() for owner in layer.modules() for named in owner.named_children())
        found = {name for name, module in modules if name_of(module) in ADAPTED}
        return tuple(sorted(found, key=lambda name: LINEARS.index(name) if name in LINEARS else len(LINEARS)))

    @property
    def fp8(self) -> bool:
        return self.uses_te and recipe_of(self.config) is not None

    @property
    def groups_experts(self) -> bool:
        """Whether one Transformer Engine linear computes for all of a rank's experts."""
        experts = (module_at(layer, "mlp.experts.linear_fc1") for layer in self.layers.values())
        return any(name_of(linear).startswith(TE_MODULE) for linear in experts if linear is not None)

    @property
    def reduces_in_backward(self) -> bool:
        """Whether gradients are reduced over replicas during the last micro-batch's backward. If stages reduce together
        (--align-grad-reduce, which Megatron sets when training begins), only the first stage of 1F1B does."""
        configs = (getattr(wrapper, "ddp_config", None) for wrapper in self.wrappers)
        together = self.pipeline > 1 and self.config.grad_sync_func is not None
        if together and (self.stage > 0 or len(self.chunks) > 1):
            return False
        return any(getattr(config, "overlap_grad_reduce", False) for config in configs)

    def shards_of(self, sequence_parallel: bool) -> int:
        """Ranks among which a sequence's tokens are cut outside of tensor-parallel linears."""
        return self.context * (self.tensor if sequence_parallel else 1)

    @property
    def group_size(self) -> int:
        """Consecutive micro-batches of one chunk."""
        return int(self.config.microbatch_group_size_per_vp_stage or self.pipeline)

    @property
    def overlaps_exchanges(self) -> bool:
        """Whether messages between stages are waited for after other passes. Only interleaved schedules can."""
        return len(self.chunks) > 1 and bool(self.config.overlap_p2p_comm)


def recipe_of(config: Any) -> str | None:
    bits = next((bits for bits in ("fp8", "fp4") if getattr(config, bits, None)), None)
    recipe = getattr(config, f"{bits}_recipe", None)
    return None if bits is None else str(getattr(recipe, "value", recipe))


def live_run(model: Any) -> LiveRun | list[Problem]:
    wrapped_chunks = [unwrapped(chunk) for chunk in (model if isinstance(model, (list, tuple)) else [model])]
    chunks = tuple(chunk for _, chunk in wrapped_chunks)
    for chunk in chunks:
        if getattr(getattr(chunk, "decoder", None), "layers", None) is None:
            return [Problem("model", f"{type(chunk).__name__} without decoder.layers", "a megatron-core GPTModel")]
        if is_hybrid(chunk) and (unknown := unknown_in(_symbols(chunk))):
            symbols, todo = f"{unknown} in {_symbols(chunk)} on this rank", "other layers are not planned in hybrid models yet"
            return [Problem("--hybrid-layer-pattern", symbols, NEEDED, todo)]
    if len({id(chunk) for chunk in chunks}) < len(chunks) or not chunks:
        return [Problem("model", f"{len(chunks)} chunks, not all different", "the list of chunks as Megatron built it")]

    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        todo = "call initialize_model_parallel before; a plan does not go by decentralised groups"
        return [Problem("megatron.core.parallel_state", "no groups", "those that the model was built with", todo)]
    return LiveRun(
        chunks=chunks,
        wrappers=tuple(wrapper for wrappers, _ in wrapped_chunks for wrapper in wrappers),
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
    wrappers = []
    while not hasattr(model, "decoder") and isinstance(getattr(model, "module", None), Module):
        wrappers.append(model)
        model = model.module  # type: ignore[assignment]
    return tuple(wrappers), model


def module_at(layer: object, path: str) -> object:
    return reduce(lambda module, name: getattr(module, name, None), path.split("."), layer)


def name_of(module: object) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


ADAPTED = {"megatron.bridge.peft.lora_layers.LoRALinear": "to_wrap"}
"""Classes that add a low-rank adapter's output to that of a frozen linear, with their attribute for this linear."""


def linear_in(module: Any) -> Any:
    return getattr(module, ADAPTED.get(name_of(module), ""), module)


def overlapped(config: Any) -> bool:
    """Whether nodes of a forward and a backward are interleaved, overlapping with the other's exchanges of experts."""
    return bool(getattr(config, "overlap_moe_expert_parallel_comm", False))


_TRANSFORMER = "megatron.core.transformer.transformer_layer."
CLASSES: Mapping[Half, tuple[str, ...]] = {
    HALVES[0]: (f"{_TRANSFORMER}TransformerLayer", "megatron.core.ssm.mamba_layer.MambaLayer"),
    HALVES[1]: ("megatron.core.ssm.mlp_layer.MLPLayer", f"{_TRANSFORMER}MoETransformerLayer"),
}


class HybridLayer:
    """One or two layers of a hybrid stack as one layer of a plan: the attributes of Megatron's layer that hooks use."""

    def __init__(self, number: int, owners: Mapping[Half, Module]) -> None:
        self.layer_number = number
        self.owners = owners

    def __getattr__(self, name: str) -> Any:
        """An attribute of the layer that has the half: the second half's attributes have its name in them."""
        first, second = HALVES
        asked = second if second in name else first
        return getattr(self.owners.get(asked) or next(iter(self.owners.values())), name)

    def modules(self) -> Iterator[Module]:
        for owner in self.owners.values():
            yield from owner.modules()


def owner_of(layer: Any, half: Half, path: str = "") -> Module:
    """The module whose method a half is. `path`: its path in the layer, if it is not the layer itself."""
    owner: Module = layer.owners[half] if isinstance(layer, HybridLayer) else layer
    return attrgetter(path)(owner) if path else owner


def is_hybrid(chunk: Module) -> bool:
    return type(getattr(chunk, "decoder", None)).__name__ == "HybridStack"


def layers_in(chunk: Module) -> list[Any]:
    layers = list(chunk.decoder.layers)  # type: ignore[union-attr, arg-type]
    if not is_hybrid(chunk) or not layers:
        return layers
    hybrid_layers, modules, first, below = layers_of(_symbols(chunk)), iter(layers), 1, layers[0].layer_number - 1
    for segment in _segments(chunk):
        if below > 0:
            first += len(layers_of(segment))
        below -= len(segment)
    owners = ({half: next(modules) for half, symbol in zip(HALVES, layer, strict=True) if symbol} for layer in hybrid_layers)
    return [HybridLayer(number, of_half) for number, of_half in enumerate(owners, start=first)]


def _symbols(chunk: Module) -> str:
    return "".join(chunk.decoder.layer_type_list)  # type: ignore[union-attr, arg-type]


def _segments(chunk: Any) -> list[str]:
    """The pattern's segments, one for each stage or chunk. Without bars Megatron cuts it into equal ones."""
    pattern, layer_count = str(chunk.hybrid_layer_pattern), len(_symbols(chunk))
    return segments_of(pattern, max(1, len(pattern) // max(1, layer_count)))


def _captured(config: Any) -> tuple[str, tuple[str, ...]]:
    """How a model's config captures graphs, and the names of its modules; none without capture."""
    implementation = str(getattr(config, "cuda_graph_impl", None) or "none")
    named = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or ()
    names = tuple(getattr(module, "name", str(module)) for module in named)
    return implementation, () if implementation == "none" else names


def captured_modules(config: Any) -> tuple[CapturedModule, ...]:
    """Those of them that plans support, in the order of plans."""
    implementation, named = _captured(config)
    return tuple(module for module in CAPTURED_MODULES if module in named and implementation == "transformer_engine")


def refused_graphs(config: Any) -> Iterator[Problem]:
    hybrid = bool(getattr(config, "is_hybrid_model", False))
    refused = refused_capture(*_captured(config), hybrid=hybrid)
    if refused is not None:
        setting, why = refused
        yield Problem("config.cuda_graph_impl", setting, f"none under a plan, or {BESIDE}", f"drop --cuda-graph-impl: {why}")


Value = TypeVar("Value")


def of_all_ranks(mine: Value) -> list[Value]:
    """The values of all ranks, in their order. Collective; NCCL uses this rank's device."""
    if not distributed.is_initialized() or distributed.get_backend() == "fake":  # the fake backend has no other ranks
        return [mine]
    gathered = [mine] * distributed.get_world_size()
    distributed.all_gather_object(gathered, mine)
    return gathered
