"""Settings of Megatron that cannot go together with two versions of the weights, or of which nobody has proven that they do.

fields of its configurations    of what a run has built              `double_buffered.match`
arguments of a launch           before a model is built              `launch.without_flushes`
                                when it is planned                   `launch_arguments.our_flags`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Needed = Mapping[str, tuple[object, str]]
"""By name: what a setting must be, and why."""

MODEL: Needed = {
    "overlap_p2p_comm": (False, "it belongs to interleaved schedules"),
    "variable_seq_lengths": (False, "stages would exchange shapes first"),
    "num_microbatches_with_partial_activation_checkpoints": (None, "the micro-batches of two batches are in flight together"),
    "defer_embedding_wgrad_compute": (False, "gradients of two batches would share its buffer"),
    "delay_wgrad_compute": (False, "gradients of two batches would share its buffer"),
    "overlap_moe_expert_parallel_comm": (False, "it has a schedule of its own"),
    "hybrid_context_parallel": (False, "it has a schedule of its own"),
    "num_moe_experts": (None, "routers keep state from batch to batch"),
    "mtp_num_layers": (None, "it was not tried"),
    "fine_grained_activation_offloading": (False, "it is reset at the end of each batch"),
    "cpu_offloading": (False, "it may hold weights"),
    "fp8": (None, "weights have copies of their own"),
    "fp4": (None, "weights have copies of their own"),
    "cuda_graph_impl": ("none", "graphs hold on to addresses of weights"),
    "enable_cuda_graph": (False, "graphs hold on to addresses of weights"),
    "external_cuda_graph": (False, "graphs hold on to addresses of weights"),
    "qk_clip": (False, "it rescales weights behind the update, by what forwards of two versions saw"),
    "log_max_attention_logit": (False, "it would mix micro-batches of two batches"),
    "gtp_weight_remat_size": (1, "weights are gathered by collectives of their own"),
}
"""Fields of the model's configuration."""

DDP: Needed = {
    "overlap_param_gather": (False, "weights would arrive during the forward of another version"),
    "num_distributed_optimizer_instances": (1, "it was not tried"),
    "use_megatron_fsdp": (False, "it moves weights itself"),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, "weights and gradients would share memory"),
    "nccl_ub": (False, "its weights live in memory registered with NCCL"),
    "fp8_param_gather": (False, "weights have copies of their own"),
    "fp4_param_gather": (False, "weights have copies of their own"),
    "param_name_patterns_for_fp32_local_accumulation": (None, "it was not tried"),
}
"""Fields of DistributedDataParallel's configuration."""

DDP_WITH_DEFERRAL: Needed = {
    "reduce_scatter_with_fp32_accumulation": (False, "it may be waited for only once; or do not defer updates")
}
"""Fields of DistributedDataParallel's configuration that matter only where updates are deferred."""

OPTIMIZER: Needed = {
    "overlap_param_gather_with_optimizer_step": (False, "weights would arrive during the forward of another version"),
    "use_precision_aware_optimizer": (False, "it was not tried"),
    "optimizer_cpu_offload": (False, "it was not tried"),
    "optimizer_cuda_graph": (False, "graphs hold on to addresses of weights"),
    "use_layer_wise_distributed_optimizer": (False, "it was not tried"),
}
"""Fields of the optimizer's configuration."""

LAUNCH: Needed = {
    "rerun_mode": ("disabled", "batches overlap: none can be run again alone"),
    "rampup_batch_size": (None, "every batch must have as many micro-batches"),
    "step_batch_size_schedule": (None, "every batch must have as many micro-batches"),
    "decrease_batch_size_if_needed": (False, "every batch must have as many micro-batches"),
    "perform_rl_step": (False, "rollouts need weights that are one version, in every step"),
    "async_save": (False, "weights move to other memory while it saves"),
    "adlr_autoresume": (False, "it would save while micro-batches are in flight"),
    "inprocess_restart": (False, "what is in flight would be lost"),
    "save_wgrads_interval": (None, "gradients of the next batch have begun"),
    "save_dgrads_interval": (None, "gradients of the next batch have begun"),
    "save_params_interval": (None, "it was not tried"),
    "save_activations_interval": (None, "it would mix micro-batches of two batches"),
    "save_tokens_per_expert_interval": (None, "it would mix micro-batches of two batches"),
    "decoder_seq_length": (None, "all stages exchange messages of one length"),
    "vision_pretraining": (False, "it was not tried"),
    "hybrid_context_parallel": (False, "it has a schedule of its own"),
    "num_experts": MODEL["num_moe_experts"],
    "use_torch_fsdp2": (False, "it moves weights itself"),
    **{name: needed for name, needed in MODEL.items() if name != "overlap_p2p_comm"},  # interleaving sets it
    **DDP,
    **OPTIMIZER,
}
"""Megatron's arguments: what they must be, and why. One that a release does not have is as it must be."""


def otherwise(settings: Any, needed: Needed) -> Iterator[tuple[str, object, object, str]]:
    """Settings that are not as needed: (name, found, needed, why). A field that this release does not have is taken as right."""
    for name, (value, why) in needed.items():
        found = getattr(settings, name, value)
        if found != value and not (value is None and not found):
            yield name, found, value, why
