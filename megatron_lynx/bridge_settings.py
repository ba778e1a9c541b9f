"""Where Megatron-Bridge's configuration (`ConfigContainer`, called `cfg`) has what Megatron-LM has a flag for.

    seq_length            cfg.model.seq_length          --seq-length
    micro_batch_size      cfg.train.micro_batch_size    --micro-batch-size
    the first part that has a field of that name; other names are in `RENAMED`

Both the planner, which reads a container, and a launch, which speaks of one, go by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

PARTS = ("model", "train", "validation", "optimizer", "scheduler", "ddp", "dist", "dataset", "checkpoint", "logger", "rng")
"""In the order in which a name is looked for."""

RENAMED = {
    "num_experts": "model.num_moe_experts",
    "enable_gloo_process_groups": "dist.use_gloo_process_groups",
    "use_gloo_process_groups": "dist.use_gloo_process_groups",
    "num_virtual_stages_per_pipeline_rank": "model.virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage": "model.virtual_pipeline_model_parallel_size",
    "group_query_attention": "model.num_query_groups",
    "swiglu": "model.gated_linear_unit",
    "tokenizer_type": "tokenizer.tokenizer_type",
    "fp8_format": "model.fp8",
    "fp4_format": "model.fp4",
    "fp8_param_gather": "ddp.fp8_param_gather",
    "recompute_activations": "model.recompute_granularity",
    "use_distributed_optimizer": "ddp.use_distributed_optimizer",
    "overlap_grad_reduce": "ddp.overlap_grad_reduce",
    "overlap_param_gather": "ddp.overlap_param_gather",
    "use_mcore_models": "model",
    "spec": "model.transformer_layer_spec",
    "use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "use_torch_fsdp2": "dist.use_torch_fsdp2",
    "te_rng_tracker": "rng.te_rng_tracker",
    "cuda_graph_impl": "model.cuda_graph_impl",
    "lr": "optimizer.lr",
    "rope_fusion": "model.apply_rope_fusion",
    "overlap_p2p_communication": "model.overlap_p2p_comm",
    "microbatch_group_size_per_virtual_pipeline_stage": "model.microbatch_group_size_per_vp_stage",
}
"""Megatron-LM's names whose setting is elsewhere than under that name in the first part that has it."""

_FLAG = re.compile(r"(?<![\w-])--(no-)?([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(-\*)?")
_CONFIG = re.compile(r"(?<![\w.])config\.(\w+)")


def places_of(name: str) -> Iterator[tuple[str, str]]:
    """(part, field) of where a setting may be, by Megatron-LM's name, best first."""
    if name in RENAMED:
        part, _, field = RENAMED[name].partition(".")
        yield part, field
        return
    yield from ((part, name) for part in PARTS)


def in_settings(text: str, has: Callable[[str, str], bool]) -> str:
    """The same text with Bridge's settings in place of Megatron-LM's flags. Flags of ours, and of nobody, stay.

    `has(part, field)`: whether the container has such a setting.
    """

    def setting(found: re.Match[str]) -> str:
        negative, words, all_of_them = found.groups()
        name = words.replace("-", "_")
        if name.startswith("lynx"):
            return found[0]
        if all_of_them:
            return f"cfg.model.{name}_*"
        place = next((place for place in places_of(name) if has(*place)), None)
        if place is None:
            return found[0]
        return f"cfg.{'.'.join(filter(None, place))}{'=False' if negative else ''}"

    text = _CONFIG.sub(r"cfg.model.\1", _FLAG.sub(setting, text))
    return text.replace("drop cfg.", "unset cfg.").replace("launch with cfg.", "train with cfg.")
