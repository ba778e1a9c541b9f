"""Transformer Engine 2.20, recorded from 2.20.2."""

from megatron_lynx.apply.transformer_engine.release import ATTENTION, EngineRelease

TE_2_20 = EngineRelease(
    version="2.20",
    norm_node="_LayerNormLinearBackward",
    norm_slots=(5, 6, 7),
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "45cdb395e69fa46e",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "b4d7b743326cbd8f",
        "transformer_engine.pytorch.module.linear:_linear_forward_impl": "245cc90ce0157526",
        "transformer_engine.pytorch.module.linear:_linear_setup_ctx": "5588fae7f2939b3a",
        "transformer_engine.pytorch.module.linear:Linear.forward": "3945f8819ce985e4",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "f0370b1b812ac226",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "b0ad15c67f82edcd",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "a533c99f35825e1c",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "b2b50c2e45b510af",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "b91c0ef4d8350916",
        "transformer_engine.pytorch.module._common:apply_normalization": "8e3428cbd7105905",
        "transformer_engine.pytorch.distributed:gather_along_first_dim": "7dc99a86a131fdfe",
        "transformer_engine.pytorch.distributed:reduce_scatter_along_first_dim": "9e2a3960fb941ef3",
        "transformer_engine.pytorch.distributed:allreduce": "1277065eff59a793",
        "transformer_engine.pytorch.utils:cast_if_needed": "2f9ec48ef2175197",
        "transformer_engine.pytorch.utils:clear_tensor_data": "69610ac5ca257edf",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "a55b4c2e8c8eb64b",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "d64737b120122b3f",
        f"{ATTENTION}.backends:FlashAttention.forward": "a71dcc03e527c478",
        f"{ATTENTION}.backends:FusedAttention.forward": "ab53a31231e908c6",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "6468e60a916c6554",
    },
)
