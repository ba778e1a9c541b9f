"""What each flag of Megatron means for a plan. Every recorded flag is of one of four kinds; a test checks that none is missing.

read           the job is made of it                      --num-layers
priced as      counted as something else, and said so     --fp16: as bf16
refused        what it does is not modelled               --spec
no matter      neither activations nor their seconds      --lr: learning rate
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lynx.launch_arguments.flag_table import Flag


@dataclass(frozen=True)
class FlagKind:
    """The kind of a flag; `why` is the reason of a refusal, what it is priced as, or what it is about."""

    name: Literal["read", "priced as", "refused", "no matter"]
    why: str = ""


def kind_of(flag: Flag) -> FlagKind | None:
    """What a flag is to a plan; None where it has not been judged yet."""
    name = flag.sets
    if name in READ:
        return FlagKind("read")
    if name in REFUSED:
        return FlagKind("refused", REFUSED[name])
    if name in PRICED_AS:
        return FlagKind("priced as", PRICED_AS[name])
    about = next((about for about, names in NO_MATTER.items() if name in names), GROUPS.get(flag.group))
    about = about or next((about for about, prefixes in PREFIXES.items() if name.startswith(tuple(prefixes))), None)
    return None if about is None else FlagKind("no matter", about)


def names_in(text: str) -> frozenset[str]:
    """The words of a text. Long lists of names are easier to read without quotes."""
    return frozenset(text.split())


READ = names_in(
    """
    num_layers encoder_num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention
    num_query_groups seq_length encoder_seq_length max_position_embeddings position_embedding_type
    use_rotary_position_embeddings add_position_embedding normalization add_bias_linear swiglu squared_relu
    untie_embeddings_and_output_weights attention_dropout hidden_dropout transformer_impl attention_backend bf16 fp16
    vocab_size padded_vocab_size pad_vocab_size make_vocab_size_divisible_by tokenizer_type vocab_file
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size cp_comm_type
    hierarchical_context_parallel_sizes sequence_parallel use_distributed_optimizer num_distributed_optimizer_instances
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank pipeline_model_parallel_layout
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split microbatch_group_size_per_vp_stage micro_batch_size global_batch_size
    rampup_batch_size step_batch_size_schedule recompute_activations recompute_granularity recompute_method
    recompute_num_layers recompute_modules moe_layer_recompute distribute_saved_activations
    fine_grained_activation_offloading offload_modules activation_offload_fraction min_offloaded_tensor_size
    cuda_graph_impl enable_cuda_graph external_cuda_graph cuda_graph_modules cuda_graph_scope cuda_graph_scope_deprecated
    cuda_graph_warmup_steps te_rng_tracker inference_rng_tracker
    delta_offload_bytes_across_pp_ranks delay_offload_until_cuda_graph fine_grained_offloading_max_inflight_offloads
    cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers overlap_moe_expert_parallel_comm
    delay_wgrad_compute ep_overlap_early_attn_memory_release defer_embedding_wgrad_compute wgrad_deferral_limit
    yaml_cfg accumulate_allreduce_grads_in_fp32
    grad_reduce_in_bf16 main_grads_dtype
    main_params_dtype exp_avg_dtype exp_avg_sq_dtype use_precision_aware_optimizer num_experts moe_router_topk
    moe_ffn_hidden_size moe_shared_expert_gate moe_shared_expert_intermediate_size moe_layer_freq moe_token_dispatcher_type
    moe_shared_expert_overlap moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_expert_rank_capacity_factor
    moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms
    moe_router_padding_for_fp8 moe_router_padding_for_quantization
    expert_model_parallel_size expert_tensor_parallel_size qk_layernorm fp8 fp8_recipe fp8_margin
    fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag
    fp8_quantizer_factory fp8_output_proj fp4 fp4_recipe fp4_param fp4_param_gather fp4_quantizer_factory
    first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    overlap_grad_reduce overlap_param_gather async_tensor_model_parallel_allreduce overlap_p2p_comm
    cross_entropy_loss_fusion cross_entropy_fusion_impl tp_comm_overlap multi_latent_attention q_lora_rank kv_lora_rank
    qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type deterministic_mode ddp_bucket_size ddp_num_buckets
    ddp_pad_buckets_for_high_nccl_busbw bias_dropout_fusion bias_gelu_fusion
    bias_swiglu_fusion masked_softmax_fusion apply_rope_fusion disable_jit_fuser optimizer_cpu_offload
    use_fused_weighted_squared_relu moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type
    moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk flash_attention_version
    mtp_num_layers quick_geglu activation_func_clamp_value glu_linear_offset softmax_type window_size window_attn_skip_freq
    optimizer sgd_momentum muon_num_ns_steps muon_scalar_optimizer optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
    hybrid_layer_pattern mamba_num_heads mamba_head_dim mamba_num_groups mamba_state_dim
    experimental_attention_variant linear_attention_freq attention_output_gate linear_num_key_heads linear_key_head_dim
    linear_num_value_heads linear_value_head_dim linear_conv_kernel_dim
    """
)
"""The job is made of them: `model_facts`, `expert_facts`, `parallel_facts`, `optimizer_facts`; or what the launch does today is
(`today`)."""

_OTHER_LAYERS = "its layers are not the transformer layers that are planned"
_OTHER_CALLS = "the sites of a layer are not called one by one"
_MORE_SAVED = "what it saves for backward is not counted"
_NO_WINDOWS = "it goes round the windows that replays run in"
_OTHER_OFFLOAD = "the plan decides what is offloaded"
_TOO_OLD = "Megatron itself no longer takes it"
_UNBALANCED = "rows that are dropped or padded for a whole rank are not priced"
_ONE_PARAMETER = "experts that share one parameter are not modelled"
_SHARDED = "sharded parameters are not modelled"

REFUSED = {
    "cache_mla_latents": "it is for inference",
    "mla_down_proj_fusion": "one linear does what two items stand for",
    "mtp_use_repeated_layer": "one layer that is called several times",
    "mtp_hybrid_override_pattern": _OTHER_LAYERS,
    "hybrid_override_pattern": _OTHER_LAYERS,
    "hybrid_attention_ratio": _OTHER_LAYERS,
    "hybrid_mlp_ratio": _OTHER_LAYERS,
    "is_hybrid_model": _OTHER_LAYERS,
    "heterogeneous_layers_config_path": "layers that differ are not modelled",
    "heterogeneous_layers_config_encoded_json": "layers that differ are not modelled",
    "spec": "a layer specification of your own: what its layers save is not known",
    "use_mamba_mem_eff_path": "what Mamba layers save without their own kernel is not counted",
    "use_legacy_models": _OTHER_LAYERS,
    "decoder_num_layers": "encoder-decoder models are not modelled",
    "relative_attention_num_buckets": "relative positions are not modelled",
    "use_te_activation_func": _OTHER_CALLS,
    "qk_l2_norm": _MORE_SAVED,
    "fp32_residual_connection": "a residual stream in fp32 is not modelled",
    "apply_residual_connection_post_layernorm": "post-norm layers are not modelled",
    "te_precision_config_file": "precision by layer is not modelled",
    "use_kitchen_attention": "kitchen's kernels are not modelled",
    "fused_residual_rmsnorm": "its norm hands on two tensors",
    "use_transformer_engine_op_fuser": _OTHER_CALLS,
    "use_grouped_gemm_for_dense_mlp": _OTHER_CALLS,
    "mlp_chunks_for_training": "each of the MLP's sites would be called several times",
    "overlap_dispatch_backward_with_experts_wgrad": "weight gradients would be computed after what they need is gone",
    "moe_latent_size": "experts of another width than the layer's are not modelled",
    "moe_input_jitter_eps": _MORE_SAVED,
    "moe_apply_probs_on_input": _MORE_SAVED,
    "moe_enable_routing_replay": "reinforcement learning is not modelled",
    "moe_extended_tp": _TOO_OLD,
    "moe_paged_stash": _OTHER_OFFLOAD,
    "moe_mlp_glu_interleave_size": _MORE_SAVED,
    "moe_shared_expert_glu_interleave_size": _MORE_SAVED,
    "moe_single_grouped_weight": _ONE_PARAMETER,
    "moe_single_grouped_bias": _ONE_PARAMETER,
    "moe_ncclep_static_shape": _UNBALANCED,
    "moe_ncclep_zero_copy": "its buffers in symmetric memory are not counted",
    "use_grouped_gemm_for_shared_expert": _OTHER_CALLS,
    "expert_tensor_parallel_num_weight_shards": "weights are gathered by collectives of their own",
    "use_ring_exchange_p2p": _NO_WINDOWS,
    "fake_process_group": "nothing is communicated, so there are no windows",
    "tensor_parallel_num_weight_shards": "weights are gathered by collectives of their own",
    "hybrid_context_parallel": "context parallelism that changes with the data is not modelled",
    "ddp_param_name_patterns_for_fp32_local_accumulation": "gradients in fp32 beside their buffer are not counted",
    "use_megatron_fsdp": _SHARDED,
    "use_torch_fsdp2": _SHARDED,
    "freeze_all_layers": "layers without gradients save nothing",
    "perform_rl_step": "reinforcement learning is not modelled",
    "sft": "packed sequences are not modelled",
    "dataloader_inter_document_masking": "packed sequences are not modelled",
    "logits_load_dir": "distillation's second loss is not counted",
    "modelopt_enabled": "what ModelOpt puts into layers is not modelled",
    "export_kd_teacher_load": "a second model beside the first is not counted",
    "use_checkpoint_args": "arguments that only a checkpoint knows: write them out",
    "use_mp_args_from_checkpoint_args": "arguments that only a checkpoint knows: write them out",
    "batch_size": _TOO_OLD,
    "warmup": _TOO_OLD,
    "model_parallel_size": _TOO_OLD,
    "checkpoint_activations": _TOO_OLD,
}
"""Flags that are refused where they differ from Megatron's default, and why."""

_LARGEST_SCORE = "the attention's largest score is read after each call"

NOT_UNDER_PLANS = {
    "inference_fuse_tp_communication": "its collectives are no windows",
    "symmetric_ar_type": "its reduction is no window",
    "qk_clip": _LARGEST_SCORE,
    "log_max_attention_logit": _LARGEST_SCORE,
}
"""Flags that matter neither to activations nor to their seconds, but beside which no plan can be installed, and why."""

ALLOWED = {"mlp_chunks_for_training": (1,)}
"""Values of refused flags that are as good as none."""

EXPERTS_OWN = ("moe_", "expert_")
"""Flags that say nothing in a launch without experts begin so."""

USERBUFFERS_OWN = "tp_comm_"
"""Flags that say nothing in a launch without userbuffers begin so."""

SOME_USERBUFFERS = "userbuffers of all linears: the range of the step, from what stock hides to everything, holds fewer, too"

_DISPATCH = "exchanges in which a token travels once to each rank of its experts"

_FUSED = "the fused kernel. Without it more is saved: leave room, or measure with megatron-lynx profile"

PRICED_AS = {
    "moe_grouped_gemm": "one expert's GEMM after another's, each as efficient as its size",
    "moe_use_legacy_grouped_gemm": "one expert's GEMM after another's, each as efficient as its size",
    "moe_permute_fusion": _FUSED,
    "moe_permute_fusion_into_hybridep": _DISPATCH,
    "moe_router_fusion": "a router without fusion, which holds more",
    "moe_router_dtype": "a router whose probabilities are in fp32",
    "moe_enable_deepep": _DISPATCH,
    "moe_flex_dispatcher_backend": _DISPATCH,
    "moe_hybridep_num_sms_preprocessing": _DISPATCH,
    "moe_hybridep_num_blocks_permute": _DISPATCH,
    "moe_hybridep_num_blocks_unpermute": _DISPATCH,
    "moe_hybridep_pad_uneven_dispatch_inputs": _DISPATCH,
    "add_qkv_bias": "no bias: some thousand parameters",
    "no_rope_freq": "rotary positions in every layer",
    "fp16_lm_cross_entropy": "a loss in fp32, which holds more",
    "pin_cpu_grads": "gradients in pinned memory, which copies are faster to",
    "use_tp_pp_dp_mapping": "links in the usual order of ranks: messages between stages are no slower, sums over replicas may be",
    "gradient_accumulation_fusion": "weight gradients that are added up in place",
    "clone_scatter_output_in_embedding": "embeddings that are cloned: without, a view holds all tensor-parallel ranks' rows",
    "muon_tp_mode": "each tensor-parallel rank's part of a matrix by itself, as blockwise",
    "muon_fp32_matmul_prec": "products in bf16, as medium",
    "batch_invariant_mode": "the usual kernels, which are faster",
    "optimizer_cuda_graph": "an update outside of a graph, which frees its copies: leave room for these",
    "ddp_reduce_scatter_with_fp32_accumulation": "reductions in place: leave room for a bucket (before 0.18 all) twice",
    "create_all_gather_group": "gathers in the group of reductions: leave room for another communicator",
    "nccl_communicator_config_path": "NCCL's own channels",
    "overlap_p2p_comm_warmup_flush": "messages as the simulator has them for this schedule",
}
"""Flags that are priced as if they said something else, and what; the user is told so."""

GROUPS = {
    "In-process restart": "restarts",
    "RNG and initialization": "random numbers",
    "autoresume": "restarts",
    "biencoder": "other models",
    "checkpointing": "checkpoints",
    "data and dataloader": "data",
    "experimental": "a feature that is not switched on",
    "fault injector": "restarts",
    "ft_package": "restarts",
    "inference": "inference",
    "learning rate and weight decay": "learning rate",
    "logging": "logging",
    "Logits Distillation": "a feature that is not switched on",
    "mixed precision": "loss scale",
    "mla": "a feature that is not switched on",
    "modelopt-generic": "a feature that is not switched on",
    "msc": "data",
    "one logger": "logging",
    "profiling": "logging",
    "regularization": "optimizer",
    "rerun engine": "restarts",
    "rl": "a feature that is not switched on",
    "sft": "a feature that is not switched on",
    "straggler": "logging",
    "tokenizer": "data",
    "validation": "evaluation",
    "vision": "other models",
    "workload inspector": "logging",
    "distributed": "data-parallel communication",
    "distributed init": "data-parallel communication",
}
"""Megatron's own headings, whole: what they are about. Not "moe": in a launch with experts that is switched on, flag by flag."""

PREFIXES = {
    "a feature that is not switched on": names_in(
        """
        mtp_ mup_ mamba_inference_ mamba_training_ dsa_ fp8_ fp4_ tp_comm_ cuda_graph_ kitchen_ inference_ yarn_ qk_clip
        """
    )
}
"""How the names of flags begin, by what they are about."""

NO_MATTER: dict[str, frozenset[str]] = {
    "a feature that is not switched on": names_in(
        """
        moe_paged_stash_page_size
        moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda high_priority_a2a_comm_stream
        mrope_section
        max_seqlen_per_dp_cp_rank tp_comm_overlap_cfg relative_attention_max_distance use_mup flash_decode
        mlp_chunks_for_prefill nccl_all_reduce_for_prefill symmetric_ar_type bert_binary_head
        pin_cpu_params use_torch_optimizer_for_cpu_offload
        """
    ),
    "numerics": names_in(
        """
        apply_query_key_layer_scaling attention_softmax_in_fp32 layernorm_zero_centered_gamma layernorm_epsilon
        rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor
        init_method_std embedding_init_method_std init_model_with_meta_device perform_initialization use_cpu_initialization
        openai_gelu onnx_safe disable_bf16_reduced_precision_matmul calculate_per_token_loss no_persist_layer_norm
        """
    ),
    "routing and balance of experts": names_in(
        """
        moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_router_force_load_balancing moe_router_force_biased moe_router_quantile_balancing_ema moe_token_drop_policy
        moe_use_upcycling moe_upcycling_granularity
        """
    ),
    "pipeline's plumbing": frozenset({"pipeline_model_parallel_comm_backend"}),
    "logging": frozenset({"config_logger_dir", "moe_per_layer_logging"}),
    "inference": frozenset({"moe_pad_experts_for_cuda_graph_inference"}),
    "no effect with core models": frozenset({"use_flash_attn", "deprecated_use_mcore_models"}),
    "length of the training, and how it ends": names_in(
        """
        train_iters train_samples train_sync_interval exit_duration_in_mins exit_interval exit_signal exit_signal_handler
        exit_signal_handler_for_dataloader exit_signal_handler_for_training iterations_to_skip dataloader_type
        decrease_batch_size_if_needed result_rejected_tracker_filename
        """
    ),
    "housekeeping": names_in(
        """
        check_for_large_grads check_for_nan_in_loss_and_grad check_weight_hash_across_dp_replicas_interval
        dump_param_to_param_group_map empty_unused_memory_level enable_gloo_process_groups gpu_sniff_test_interval
        high_priority_stream_groups manual_gc manual_gc_eval manual_gc_interval
        """
    ),
}
"""Single flags that matter neither to activations nor to their seconds, by what they are about."""
