"""Transformer Engine 2.16, recorded from 2.16.0."""

from megatron_lynx.apply.transformer_engine.release import ATTENTION, EngineRelease

TE_2_16 = EngineRelease(
    version="2.16",
    norm_node="_LayerNormLinearBackward",
    norm_slots=(5, 6, 7),
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "6f8abc712597506c",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "047667a9adc7d8fb",
        "transformer_engine.pytorch.module.linear:_linear_forward_impl": "6be982b3f8eb4841",
        "transformer_engine.pytorch.module.linear:_linear_setup_ctx": "7e934f6b77d5ecb5",
        "transformer_engine.pytorch.module.linear:_linear_backward": "3b24915f1b046a1a",
        "transformer_engine.pytorch.module.linear:Linear.forward": "e3ced08e8f2ab807",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "b485b81212a7ee49",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "7c7281ed1d06982d",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "e174966eafa1b087",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "ea4e68afff0922d2",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "e53743753104e11a",
        "transformer_engine.pytorch.module._common:apply_normalization": "8e3428cbd7105905",
        "transformer_engine.pytorch.distributed:gather_along_first_dim": "459ef4842d10dfe0",
        "transformer_engine.pytorch.distributed:reduce_scatter_along_first_dim": "c53f0ff11f5b8521",
        "transformer_engine.pytorch.distributed:allreduce": "1277065eff59a793",
        "transformer_engine.pytorch.utils:cast_if_needed": "2f9ec48ef2175197",
        "transformer_engine.pytorch.utils:clear_tensor_data": "69610ac5ca257edf",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "e58487319321ccc5",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "00635e59ca999b5a",
        f"{ATTENTION}.backends:FlashAttention.forward": "06ed716f8722a931",
        f"{ATTENTION}.backends:FusedAttention.forward": "e82de106d2eac71a",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "1acc9ed72b8a1e52",
    },
)
