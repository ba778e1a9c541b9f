"""Transformer Engine 2.15, recorded from 2.15.0."""

from megatron_lynx.apply.transformer_engine.release import ATTENTION, EngineRelease

TE_2_15 = EngineRelease(
    version="2.15",
    norm_node="_LayerNormLinearBackward",
    norm_slots=(5, 6, 7),
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "6d50c4f415f316d1",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "ab553c203664f3a4",
        "transformer_engine.pytorch.module.linear:_linear_forward_impl": "d316c58bde0696ca",
        "transformer_engine.pytorch.module.linear:_linear_setup_ctx": "160e5893a42c7884",
        "transformer_engine.pytorch.module.linear:_linear_backward": "b3d292fb673be1f9",
        "transformer_engine.pytorch.module.linear:Linear.forward": "e9e68d5f6e0f75f5",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "997758585c05382b",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "76ea6eecdd783d4b",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "08d6d647e4369459",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "3c179e4d92d11948",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "e53743753104e11a",
        "transformer_engine.pytorch.module._common:apply_normalization": "8e3428cbd7105905",
        "transformer_engine.pytorch.distributed:gather_along_first_dim": "459ef4842d10dfe0",
        "transformer_engine.pytorch.distributed:reduce_scatter_along_first_dim": "c53f0ff11f5b8521",
        "transformer_engine.pytorch.distributed:allreduce": "1277065eff59a793",
        "transformer_engine.pytorch.utils:cast_if_needed": "2f9ec48ef2175197",
        "transformer_engine.pytorch.utils:clear_tensor_data": "69610ac5ca257edf",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "4ecbe04ba85b63e5",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "76bc527deecde631",
        f"{ATTENTION}.backends:FlashAttention.forward": "169a65d48775192c",
        f"{ATTENTION}.backends:FusedAttention.forward": "316d63adfbffb391",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "16231dfe247a22e9",
    },
)
