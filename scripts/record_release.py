"""Draft the table of one megatron-core release: `python scripts/record_release.py` prints it for the one that is importable.

`PYTHONPATH=CHECKOUT python scripts/record_release.py` drafts that of a checkout, or of an unpacked wheel. With Transformer Engine
on that path, too, what matters beside it is among it, and `python scripts/record_release.py transformer_engine` drafts its table.

The draft holds fingerprints only. Before it is committed somebody reads what changed since the last table (`git diff` of the two
releases, for the functions named) and runs the tests against it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from megatron_lynx.apply.releases import installed_version, minor_of
from megatron_lynx.apply.releases.release import fingerprint
from megatron_lynx.apply.transformer_engine import installed_te
from megatron_lynx.apply.transformer_engine.release import ATTENTION
from megatron_lynx.errors import HookRefused
from megatron_lynx.testbed.cpu_device import stand_in_for_cuda
from megatron_lynx.testbed.missing_modules import stand_in_for_missing_modules

CORE = "megatron.core"
RELIED_ON = (
    f"{CORE}.transformer.transformer_layer:TransformerLayer.forward",
    f"{CORE}.transformer.transformer_layer:TransformerLayer._forward_attention",
    f"{CORE}.transformer.transformer_layer:TransformerLayer._forward_mlp",
    f"{CORE}.transformer.transformer_layer:TransformerLayer._forward_post_mlp",  # until 0.19; then those of 0.20
    f"{CORE}.transformer.transformer_layer:TransformerLayer._run_input_layernorm",
    f"{CORE}.transformer.transformer_layer:TransformerLayer._apply_self_attn_bda_step",
    f"{CORE}.transformer.transformer_layer:TransformerLayer._pre_mlp_layernorm_and_residual",
    f"{CORE}.transformer.transformer_layer:TransformerLayer._run_mlp",
    f"{CORE}.transformer.transformer_layer:TransformerLayer._apply_mlp_bda_step",
    f"{CORE}.transformer.transformer_block:TransformerBlock.forward",
    f"{CORE}.transformer.attention:Attention.forward",
    f"{CORE}.transformer.attention:SelfAttention.get_query_key_value_tensors",
    f"{CORE}.transformer.mlp:MLP.forward",
    f"{CORE}.transformer.dot_product_attention:DotProductAttention.forward",
    f"{CORE}.fusions.fused_bias_dropout:_bias_dropout_add_func",
    f"{CORE}.tensor_parallel.layers:ColumnParallelLinear.forward",
    f"{CORE}.tensor_parallel.layers:RowParallelLinear.forward",
    f"{CORE}.tensor_parallel.layers:_linear_forward",  # since 0.20
    f"{CORE}.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.forward",
    f"{CORE}.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
    f"{CORE}.tensor_parallel.mappings:_reduce",
    f"{CORE}.tensor_parallel.mappings:_gather_along_first_dim",
    f"{CORE}.tensor_parallel.mappings:_reduce_scatter_along_first_dim",
    f"{CORE}.tensor_parallel.random:CudaRNGStatesTracker",
    f"{CORE}.pipeline_parallel.schedules:forward_step",
    f"{CORE}.pipeline_parallel.schedules:backward_step",
    f"{CORE}.pipeline_parallel.schedules:deallocate_output_tensor",
    f"{CORE}.pipeline_parallel.schedules:custom_backward",
    f"{CORE}.pipeline_parallel.schedules:forward_backward_no_pipelining",
    f"{CORE}.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
    f"{CORE}.pipeline_parallel.schedules:get_pp_rank_microbatches",
    f"{CORE}.pipeline_parallel.schedules:get_schedule_table",
    f"{CORE}.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
    f"{CORE}.pipeline_parallel.p2p_communication:_p2p_ops",
    f"{CORE}.pipeline_parallel.p2p_communication:_batched_p2p_ops",
    f"{CORE}.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
)
BESIDE_TE = (
    f"{CORE}.extensions.transformer_engine:TELinear.forward",
    f"{CORE}.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward",
    f"{CORE}.extensions.transformer_engine:TEDotProductAttention.forward",
)
BESIDE_EXPERTS = (
    f"{CORE}.transformer.moe.moe_layer:MoELayer.forward",
    f"{CORE}.transformer.moe.moe_utils:MoEAuxLossAutoScaler",
    f"{CORE}.transformer.moe.router:TopKRouter.forward",
)

TE = "transformer_engine.pytorch"
RELIED_ON_OF_TE = (
    f"{TE}.module.linear:_Linear.forward",
    f"{TE}.module.linear:_Linear.backward",
    f"{TE}.module.linear:_linear_forward_impl",
    f"{TE}.module.linear:_linear_setup_ctx",
    f"{TE}.module.linear:_linear_backward",
    f"{TE}.module.linear:Linear.forward",
    f"{TE}.module.layernorm_linear:_LayerNormLinear.forward",
    f"{TE}.module.layernorm_linear:_LayerNormLinear.backward",
    f"{TE}.module.layernorm_linear:LayerNormLinear.forward",
    f"{TE}.module.base:TransformerEngineBaseModule.prepare_forward",
    f"{TE}.module.base:TransformerEngineBaseModule.grad_output_preprocess",
    f"{TE}.module._common:apply_normalization",
    f"{TE}.distributed:gather_along_first_dim",
    f"{TE}.distributed:reduce_scatter_along_first_dim",
    f"{TE}.distributed:allreduce",
    f"{TE}.utils:cast_if_needed",
    f"{TE}.utils:clear_tensor_data",
    f"{ATTENTION}.dot_product_attention:DotProductAttention.forward",
    f"{ATTENTION}.backends:UnfusedDotProductAttention.forward",
    f"{ATTENTION}.backends:FlashAttention.forward",
    f"{ATTENTION}.backends:FusedAttention.forward",
    f"{ATTENTION}.backends:FusedAttnFunc.forward",
)
RELIED_ON_IN_FP8 = (
    f"{TE}.quantization:FP8GlobalStateManager.get_autocast_state",
    f"{TE}.quantization:FP8GlobalStateManager.set_autocast_state",
    f"{TE}.quantization:FP8GlobalStateManager.is_first_fp8_module",
    f"{TE}.quantization:FP8GlobalStateManager.add_fp8_tensors_to_global_buffer",
    f"{TE}.quantization:DelayedScalingRecipeState",
    f"{TE}.module.base:TransformerEngineBaseModule.init_fp8_metadata",
    f"{TE}.module.base:TransformerEngineBaseModule.get_weight_workspace",
    f"{TE}.module.base:quantize_weight",
    f"{TE}.module.linear:Linear._get_quantizers",
    f"{TE}.module.layernorm_linear:LayerNormLinear._get_quantizers",
    f"{TE}.tensor.float8_tensor:Float8Quantizer",
    f"{TE}.tensor.float8_tensor:Float8CurrentScalingQuantizer",
    f"{TE}.tensor.storage.float8_tensor_storage:Float8TensorStorage",
    f"{TE}.distributed:_all_gather_fp8",
)


def draft() -> str:
    """The table as a Python module. A function that this release lacks is left out, with a comment that says so."""
    minor = minor_of(installed_version())
    name = f"CORE_{minor.replace('.', '_')}"
    lines = [f'"""megatron-core {minor}, recorded from {installed_version()}."""', ""]
    lines += ["from megatron_lynx.apply.releases.release import Release", "", f"{name} = Release(", f'    version="{minor}",']
    lines += _mapping("fingerprints", RELIED_ON)
    with suppress(HookRefused):
        installed_te()
        lines += _mapping("beside_te", BESIDE_TE)
    lines += _mapping("beside_experts", BESIDE_EXPERTS)
    return "\n".join([*lines, ")", ""])


def te_draft() -> str:
    """The same for Transformer Engine. The slots are those of the last releases read, for somebody to check."""
    minor = minor_of(installed_te())
    lines = [f'"""Transformer Engine {minor}, recorded from {installed_te()}."""', ""]
    lines += ["from megatron_lynx.apply.transformer_engine.release import ATTENTION, TeRelease", ""]
    lines += [f"TE_{minor.replace('.', '_')} = TeRelease(", f'    version="{minor}",']
    lines += ['    norm_node="_LayerNormLinearBackward",', "    norm_slots=(5, 6, 7),"]
    lines += [*_mapping("fingerprints", RELIED_ON_OF_TE), *_mapping("in_fp8", RELIED_ON_IN_FP8)]
    return "\n".join([*lines, ")", ""])


def _mapping(name: str, functions: Sequence[str]) -> list[str]:
    lines = [f"    {name}={{"]
    for function in functions:
        try:
            name = f'f"{{ATTENTION}}{function.removeprefix(ATTENTION)}"' if function.startswith(ATTENTION) else f'"{function}"'
            lines.append(f'        {name}: "{fingerprint(function)}",')
        except (ImportError, AttributeError):
            lines.append(f"        # {function}: not in this release")
    return [*lines, "    },"]


if __name__ == "__main__":
    stand_in_for_cuda()
    stand_in_for_missing_modules()  # where there is no GPU
    print(te_draft() if sys.argv[1:] == ["transformer_engine"] else draft(), end="")
