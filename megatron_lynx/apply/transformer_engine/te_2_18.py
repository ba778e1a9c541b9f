"""Transformer Engine 2.18, recorded from 2.18.0."""

from megatron_lynx.apply.transformer_engine.release import ATTENTION, EngineRelease

TE_2_18 = EngineRelease(
    version="2.18",
    norm_node="_LayerNormLinearBackward",
    norm_slots=(5, 6, 7),
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "6f8abc712597506c",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "047667a9adc7d8fb",
        "transformer_engine.pytorch.module.linear:_linear_forward_impl": "77c6d204ec25f8c1",
        "transformer_engine.pytorch.module.linear:_linear_setup_ctx": "5e246ca3bfd43b87",
        "transformer_engine.pytorch.module.linear:_linear_backward": "ac97bed59350d8b0",
        "transformer_engine.pytorch.module.linear:Linear.forward": "5bfc624e1061c731",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "66d2cf5e6a52afe2",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "dbcc3bb7bcf91ee3",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "a533c99f35825e1c",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "ea4e68afff0922d2",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "e53743753104e11a",
        "transformer_engine.pytorch.module._common:apply_normalization": "8e3428cbd7105905",
        "transformer_engine.pytorch.distributed:gather_along_first_dim": "459ef4842d10dfe0",
        "transformer_engine.pytorch.distributed:reduce_scatter_along_first_dim": "c53f0ff11f5b8521",
        "transformer_engine.pytorch.distributed:allreduce": "1277065eff59a793",
        "transformer_engine.pytorch.utils:cast_if_needed": "2f9ec48ef2175197",
        "transformer_engine.pytorch.utils:clear_tensor_data": "69610ac5ca257edf",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "c66d4c2eb99e353e",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "00635e59ca999b5a",
        f"{ATTENTION}.backends:FlashAttention.forward": "d9e985d2ca819549",
        f"{ATTENTION}.backends:FusedAttention.forward": "cc2ba162ca4b01ea",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "1acc9ed72b8a1e52",
    },
)
