"""Settings of Megatron that hooks cannot work with, and which flag to drop: the fields of its model config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lynx.apply.graphs import refused_graphs
from megatron_lynx.apply.live_run import not_one, switched_on
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.running import FACES

OFF = {
    "cpu_offloading": "--cpu-offloading: the plan decides what is offloaded",
    "fine_grained_activation_offloading": "--fine-grained-activation-offloading: the plan decides what is offloaded",
    "moe_layer_recompute": "--moe-layer-recompute: the plan decides what is recomputed",
    "moe_paged_stash": "--moe-paged-stash: it packs what experts save, by hooks of its own on all layers",
    "heterogeneous_block_specs": "--heterogeneous-layers-config-path: layers differ in kind",
    "num_microbatches_with_partial_activation_checkpoints": "that setting: the plan decides what is recomputed",
    "distribute_saved_activations": "--distribute-saved-activations: it needs stock recomputation",
    "hybrid_context_parallel": "--hybrid-context-parallel: among how many ranks a sequence is cut differs from one to the next",
    "use_ring_exchange_p2p": "--use-ring-exchange-p2p: it returns no Work to wait for",
    "inference_fuse_tp_communication": "--inference-fuse-tp-communication",
    "fused_residual_rmsnorm": "--fused-residual-rmsnorm: its norm hands on two tensors",
    "use_transformer_engine_op_fuser": "--use-transformer-engine-op-fuser: the MLP's linears are not called one by one",
    "use_grouped_gemm_for_dense_mlp": "--use-grouped-gemm-for-dense-mlp: the MLP's linears are not called one by one",
}
"""Config fields that must be off, and what to drop."""

OFF_WITH_TE = {
    "use_te_activation_func": "--use-te-activation-func: Transformer Engine's activations are not held",
    "symmetric_ar_type": "--symmetric-ar-type: that reduction is no window",
    "enable_autocast": "--enable-autocast: weights would be cast anew in every replay",
    "qk_clip": "--qk-clip: it reads the attention's largest score after each call",
    "log_max_attention_logit": "--log-max-attention-logit: it reads the attention's largest score after each call",
    "quant_recipe": "--te-precision-config-file: quantized linears are not held",
}
"""Config fields that must also be off if the layers are Transformer Engine's, and what to drop."""

KEPT_WHOLE = "gated_delta_net"
"""The attention variant that plans keep whole (`kinds.opaque`)."""

ONE = {
    "mlp_chunks_for_training": "--mlp-chunks-for-training: each of the MLP's sites would be called several times",
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards: weights are gathered by collectives of their own",
}
"""Config fields that must be 1 where a release has them, and what to drop."""


def refused_features(config: Any, *, te: bool) -> Iterator[Problem]:
    """Every setting that a plan cannot work with. `te`: the layers are Transformer Engine's."""
    yield from switched_on(config, OFF, "off under a plan")
    for name, drop in ONE.items():
        yield from not_one(config, name, drop)
    if (variant := getattr(config, "experimental_attention_variant", None)) not in (None, KEPT_WHOLE):
        todo = "drop --experimental-attention-variant: its projections are not sites"
        yield Problem("config.experimental_attention_variant", str(variant), f"none, or {KEPT_WHOLE}", todo)
    yield from refused_graphs(config)
    for face in FACES:
        yield from face.refused_settings(config)
    if te:
        yield from switched_on(config, OFF_WITH_TE, "off under a plan with Transformer Engine")
