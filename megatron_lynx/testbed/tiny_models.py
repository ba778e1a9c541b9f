"""Builds a job's models from megatron-core's local or Transformer Engine layers.

job.model, job.parallel ──> TransformerConfig ──> one GPTModel per chunk
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_lynx.anatomy import DENSE
from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.kinds.experts.section import FUSED
from megatron_lynx.kinds.latent.section import Q_NORM, SIZES
from megatron_lynx.plan.layout import layout_text
from megatron_lynx.testbed.fusions import fusion_fields

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ACTIVATIONS = {
    "gelu": torch.nn.functional.gelu,
    "swiglu": torch.nn.functional.silu,
    "quick_geglu": quick_gelu,
    "squared_relu": squared_relu,
}

MODULES = "cuda_graph_modules" if hasattr(TransformerConfig, "cuda_graph_modules") else "cuda_graph_scope"
"""Field for CUDA-graph modules; renamed in 0.18."""


def transformer_config(job: Job, **overrides: Any) -> TransformerConfig:
    """`overrides`: fields of TransformerConfig. Raises `ConfigError` for flash attention without Transformer Engine on a GPU."""
    model, parallel = job.model, job.parallel
    fused = model.attention == "flash"
    if fused and not (model.uses_te and torch.cuda.is_available()):
        problem = Problem("job: model.attention", "flash", "unfused", "the testbed's layers keep the scores")
        raise ConfigError("The testbed cannot build this model.", [problem])
    dtype = DTYPES[model.dtype]
    fields: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_groups,
        "kv_channels": model.head_size,
        "attention_backend": AttnBackend.auto if fused else AttnBackend.unfused,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "add_bias_linear": model.bias,
        "qk_layernorm": model.qk_norm,
        "gated_linear_unit": model.gated,
        "activation_func": ACTIVATIONS[model.activation],
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "cp_comm_type": parallel.context_exchange,
        "sequence_parallel": parallel.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": model.dtype == "bf16",
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Interleaved schedules free an output in flight, and gloo would send freed memory.
        "deallocate_pipeline_outputs": job.chunks == 1,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    if model.cross_entropy != "unfused":
        fields |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": model.cross_entropy}
    if model.fp8 is not None:
        bits = "fp4" if model.fp8.recipe == "nvfp4" else "fp8"
        fields |= {bits: model.fp8.format, f"{bits}_recipe": model.fp8.recipe, f"{bits}_param": model.fp8.parameters}
        ends = model.fp8.first_in_bf16, model.fp8.last_in_bf16
        fields |= {"first_last_layers_bf16": any(ends)}
        fields |= dict(zip(("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), ends, strict=True))
    if job.chunks > 1:
        fields |= {"virtual_pipeline_model_parallel_size": job.chunks, "overlap_p2p_comm": True, "batch_p2p_comm": False}
        fields["microbatch_group_size_per_vp_stage"] = job.microbatch_group
    fields |= fusion_fields(job) | expert_fields(job) | latent_fields(job)
    if model.activation == "quick_geglu":
        fields["glu_linear_offset"] = 1.0
    if model.activation_clamped:
        fields["activation_func_clamp_value"] = 7.0
    if model.sinks:
        fields["softmax_type"] = "learnable"
    if model.window is not None:
        all_seen = round((1 - model.window.share) * model.layers)
        seen = [0] * all_seen + [1] * (model.layers - all_seen)
        fields |= {"window_size": (model.window.keys - 1, 0), "window_attn_skip_freq": seen}
    if model.captured:
        fields |= {"cuda_graph_impl": "transformer_engine", MODULES: list(model.captured)}
    if model.mtp:
        fields |= {"mtp_num_layers": model.mtp, "mtp_loss_scaling_factor": 0.3}
    if job.userbuffers:
        fields["tp_comm_overlap"] = True
    if len(set(job.partition)) > 1:
        fields["pipeline_model_parallel_layout"] = layout_text(job.partition, model.mtp)
    kind = TransformerConfig if model.latent is None else MLATransformerConfig
    return kind(**{**fields, **overrides})


def latent_fields(job: Job) -> dict[str, Any]:
    sizes = job.model.latent
    if sizes is None:
        return {}
    return {
        "multi_latent_attention": True,
        **{name: getattr(sizes, size) for size, name in SIZES.items()},
        "kv_channels": sizes.value_head_size,
        "rope_type": "yarn" if sizes.fused_rotary else "rope",  # the only one that Megatron fuses
        "apply_rope_fusion": sizes.fused_rotary,
    }


def expert_fields(job: Job) -> dict[str, Any]:
    experts = job.model.experts
    if experts is None:
        return {}
    dispatcher: dict[str, str] = {"moe_token_dispatcher_type": experts.dispatcher}
    if experts.dispatcher in FUSED:
        flex = {"moe_flex_dispatcher_backend": experts.dispatcher, "moe_router_dtype": "fp32"}
        dispatcher = {"moe_token_dispatcher_type": "flex", **flex}
    options = {
        "moe_router_padding_for_quantization": experts.filled,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_shared_expert_overlap": experts.shared_beside,
        "overlap_moe_expert_parallel_comm": experts.overlapped,
        "delay_wgrad_compute": experts.delayed,
    }
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_layer_freq": [int(number in job.model.expert_layers) for number in range(1, job.model.layers + 1)],
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        **dispatcher,
        **{name: True for name, on in options.items() if on},
        "expert_model_parallel_size": job.parallel.expert,
        "expert_tensor_parallel_size": job.parallel.expert_tensor_size,
    }


def build_model(
    job: Job,
    *,
    draw: Callable[[GPTModel], object] | None = None,
    weights_of: Sequence[torch.nn.Module] | None = None,
    **overrides: Any,
) -> list[GPTModel | Float16Module]:
    """Return this rank's chunks in training mode, on the GPU if there is one: one, or `job.chunks` virtual stages.

    Needs an initialised `parallel_state`. `draw`: gives a chunk its weights, by default Megatron's initialization does.
    `weights_of`: chunks whose parameters are shared. `overrides`: fields of TransformerConfig, such as stock recomputation.
    """
    config = transformer_config(job, **{"perform_initialization": weights_of is None, **overrides})
    if job.userbuffers and config.tp_comm_overlap:
        make_userbuffers(job, config.params_dtype)
    chunks = []
    for number in range(job.chunks):
        chunk = _build_chunk(job, config, number if job.chunks > 1 else None)
        if draw is not None:
            draw(chunk)
        chunks.append(Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk)
    for chunk, like in zip(chunks, weights_of or (), strict=False):
        share_weights(chunk, like)
    return chunks


def _build_chunk(job: Job, config: TransformerConfig, vp_stage: int | None) -> GPTModel:
    model = job.model
    block = block_spec(config, vp_stage, model.uses_te)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=model.vocab,
        max_sequence_length=model.seq,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=last,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope" if model.position == "rope" else "learned_absolute",
        vp_stage=vp_stage,
        **({"mtp_block_spec": predicting_spec(config, block, vp_stage, te=model.uses_te)} if last and model.mtp else {}),
    )
    return chunk.cuda(torch.cuda.current_device())


def block_spec(config: TransformerConfig, vp_stage: int | None, te: bool) -> TransformerBlockSubmodules:
    """Return the spec of the layers of a stage or chunk: Transformer Engine's, or Megatron's local ones with torch's norms."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=te, vp_stage=vp_stage)
    if not te:
        block.layer_norm = Norm
        for layer in block.layer_specs:
            exchange_norms(layer.submodules)
    return block


def predicting_spec(config: TransformerConfig, block: TransformerBlockSubmodules, vp_stage: int | None, *, te: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    spec = get_gpt_mtp_block_spec(config, block, use_transformer_engine=te, vp_stage=vp_stage)
    for layer in spec.layer_specs if not te else ():
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(layer.submodules, name, Norm)
    return spec


def exchange_norms(layer: Any) -> None:
    """Replace one layer's norms by ours. Equal layers share their submodules: a second call changes nothing."""
    attention = layer.self_attention.submodules
    inner = (Q_NORM.name, "k_layernorm")
    for owner, name in (
        *((layer, section.norm) for section in DENSE.values()),
        *((attention, name) for name in inner if hasattr(attention, name)),
    ):
        if getattr(owner, name) is not IdentityOp:
            setattr(owner, name, Norm)


class Norm:
    """Torch's LayerNorm or RMSNorm for a layer spec; Megatron sums gradients of parameters marked for sequence parallelism."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:  # type: ignore[misc]
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def share_weights(chunk: torch.nn.Module, like: torch.nn.Module) -> None:
    """Give a chunk the parameter objects of an equal one, so that gradients are shared as well."""
    for place, module in chunk.named_modules():
        other = like.get_submodule(place)
        for name in list(module._parameters):
            setattr(module, name, other._parameters[name])


def make_userbuffers(job: Job, dtype: torch.dtype) -> None:
    from transformer_engine.pytorch.module import base

    base.destroy_ub()
    quantized = base.UserBufferQuantizationMode.NONE if job.model.fp8 is None else base.UserBufferQuantizationMode.FP8
    base.initialize_ub(
        shape=[job.model.seq * job.batch.micro // job.parallel.context, job.model.hidden],
        tp_size=job.parallel.tensor,
        quantization_modes=[quantized],
        dtype=dtype,
        bootstrap_backend="gloo",
    )
