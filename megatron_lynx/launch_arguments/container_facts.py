"""A container's values by the names that Megatron-LM's flags have: all behind it is a launch's.

cfg.model.num_layers: 32                 ─┐  bridge_settings.places_of
cfg.model.activation_func: silu, gated   ─┴─────────────> {num_layers: 32, swiglu: True, ...}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_lynx.bridge_settings import places_of, refused_settings
from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.container import Container
from megatron_lynx.launch_arguments.container_model import (
    LAYERS_OF_MEGATRON,
    LAYERS_OF_TE,
    activation,
    is_of_tokenizer,
    refused_model,
    vocabulary,
)
from megatron_lynx.launch_arguments.files import checked
from megatron_lynx.launch_arguments.flag_table import FlagTable
from megatron_lynx.launch_arguments.given import Given, Value
from megatron_lynx.launch_arguments.today import REPLACED


def given_container(container: Container, table: FlagTable) -> tuple[Given, list[Problem]]:
    """Its values by Megatron's names, and everything that is wrong with it or not modelled."""
    problems = [*refused_model(container, table), *refused_settings(container.cfg)]
    release, values = table.releases[-1], {}
    for name, flags in table.of_name.items():
        flag = next((flag for flag in flags if release in flag.releases), None)
        place = next((place for place in places_of(name) if place[1] and container.has(*place)), None)
        if flag is None or place is None:
            continue
        said, default = "cfg." + ".".join(place), table.default(name, release)
        value = TOLD[name](container) if name in TOLD else container.get(".".join(place))
        counts = flag.is_read and name not in REPLACED
        if value is None or (not counts and (value == default or not (value or default))):
            continue
        if isinstance(value, list) and flag.takes in (0, 1):
            value = ",".join(map(str, value)) if name == "window_size" else str(value)
        values[name] = Value(flag, said, checked(flag, said, value, problems) if flag.is_read else value)
    if vocabulary(container) is None:  # that it is missing is said above
        flag = next(flag for flag in table.of_name["vocab_size"] if release in flag.releases)
        values["vocab_size"] = Value(flag, "cfg.tokenizer.vocab_size", None)
    return Given(values, (release,), table, packed=_packed_by(container)), problems


PACKING = ("enable_offline_packing", "enable_in_batch_packing", "packed_sequence_specs", "pack_sequences_in_batch")
"""Settings of data sets whose sequences are packed: of 0.6, and of 0.5."""


def _packed_by(container: Container) -> str:
    return next((f"cfg.dataset.{name}" for name in PACKING if container.get(f"dataset.{name}")), "")


LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def _layout(container: Container) -> str | None:
    """Bridge takes lists, too: of what each virtual stage has."""
    said = container.get("model.pipeline_model_parallel_layout")
    if not isinstance(said, list):
        return None if said is None else str(said)
    stages = [stage if isinstance(stage, list) else [stage] for stage in said]
    return "|".join("".join(LETTERS.get(str(one), str(one)) for one in stage) for stage in stages)


def _grouped(container: Container) -> bool:
    return container.get("model.num_query_groups") not in (None, container.get("model.num_attention_heads"))


def _implementation(container: Container) -> Any:
    spec = str(container.get("model.transformer_layer_spec"))
    return "local" if spec == LAYERS_OF_MEGATRON else "transformer_engine"


def _strange_layers(container: Container) -> str | None:
    spec = str(container.get("model.transformer_layer_spec"))
    return None if spec in (*LAYERS_OF_TE, LAYERS_OF_MEGATRON) else spec


def _pattern(container: Container) -> Any:
    """Of a hybrid stack, as Megatron-LM's `pretrain_hybrid.py` has it. 0.5 takes it under an older name, too."""
    return container.get("model.hybrid_layer_pattern") or container.get("model.hybrid_override_pattern")


TOLD: dict[str, Callable[[Container], Any]] = {
    "swiglu": lambda container: activation(container) == ("silu", True),
    "squared_relu": lambda container: activation(container) == ("squared_relu", False),
    "quick_geglu": lambda container: activation(container) == ("quick_gelu", True),
    "untie_embeddings_and_output_weights": lambda container: not container.get("model.share_embeddings_and_output_weights", True),
    "group_query_attention": _grouped,
    "grad_reduce_in_bf16": lambda container: not container.get("ddp.grad_reduce_in_fp32"),
    "vocab_size": vocabulary,
    "pad_vocab_size": lambda container: (
        is_of_tokenizer(container) or (container.is_resolved and bool(container.get("model.should_pad_vocab")))
    ),
    "transformer_impl": _implementation,
    "spec": _strange_layers,
    "is_hybrid_model": lambda container: None if _pattern(container) else container.get("model.is_hybrid_model"),
    "hybrid_layer_pattern": _pattern,
    "cuda_graph_modules": lambda container: (
        own if (own := container.get("model.cuda_graph_modules")) != "full" else container.get("model.cuda_graph_scope")
    ),
    "use_distributed_optimizer": lambda container: bool(
        container.get("ddp.use_distributed_optimizer") or container.get("optimizer.use_distributed_optimizer")
    ),
    "fp8_param_gather": lambda container: bool(container.get("ddp.fp8_param_gather") or container.get("model.fp8_param")),
    "fp4_param_gather": lambda container: bool(container.get("ddp.fp4_param_gather") or container.get("model.fp4_param")),
    "te_rng_tracker": lambda container: bool(container.get("rng.te_rng_tracker") or container.get("model.use_te_rng_tracker")),
    "use_megatron_fsdp": lambda container: bool(
        container.get("ddp.use_megatron_fsdp") or container.get("dist.use_megatron_fsdp")
    ),
    "pipeline_model_parallel_layout": _layout,
    "overlap_p2p_comm": lambda container: (
        container.get("model.overlap_p2p_comm") if container.get("model.virtual_pipeline_model_parallel_size") else None
    ),
    "apply_rope_fusion": lambda container: (
        container.get("model.apply_rope_fusion") if container.get("model.position_embedding_type") == "rope" else None
    ),
    "cpu_offloading_num_layers": lambda container: (
        container.get("model.cpu_offloading_num_layers") if container.get("model.cpu_offloading") else None
    ),
    **dict.fromkeys(
        (
            "hybrid_override_pattern",
            "recompute_activations",
            "num_layers_per_virtual_pipeline_stage",
            "vocab_file",
            "max_position_embeddings",
        ),
        lambda container: None,
    ),
    "async_tensor_model_parallel_allreduce": lambda container: None,  # megatron-core looks at it no more
}
"""What Bridge says in another way, by Megatron's names; None: as if nothing were said."""
