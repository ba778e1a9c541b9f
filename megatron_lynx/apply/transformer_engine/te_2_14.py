"""Transformer Engine 2.14, recorded from 2.14.0."""

from megatron_lynx.apply.transformer_engine.release import ATTENTION, EngineRelease

TE_2_14 = EngineRelease(
    version="2.14",
    norm_node="_LayerNormLinearBackward",
    norm_slots=(5, 6, 7),
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "e2bfe0dcc4d5e7cf",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "91c4fbdf4303695d",
        "transformer_engine.pytorch.module.linear:Linear.forward": "0bec4d4324c6dece",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "d7ce00be9c63d8e9",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "38ed5418ca8dcd5a",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "48a1614cc6997c1f",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "3c179e4d92d11948",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "924c16732120c7b6",
        "transformer_engine.pytorch.module._common:apply_normalization": "8e3428cbd7105905",
        "transformer_engine.pytorch.distributed:gather_along_first_dim": "459ef4842d10dfe0",
        "transformer_engine.pytorch.distributed:reduce_scatter_along_first_dim": "c53f0ff11f5b8521",
        "transformer_engine.pytorch.distributed:allreduce": "1277065eff59a793",
        "transformer_engine.pytorch.utils:cast_if_needed": "2f9ec48ef2175197",
        "transformer_engine.pytorch.utils:clear_tensor_data": "69610ac5ca257edf",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "461be596ba32ee93",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "8a1371f0d5814adc",
        f"{ATTENTION}.backends:FlashAttention.forward": "52d7105cb2b98860",
        f"{ATTENTION}.backends:FusedAttention.forward": "bc8b71b1a081f7ca",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "c6de3114676f171d",
    },
)
