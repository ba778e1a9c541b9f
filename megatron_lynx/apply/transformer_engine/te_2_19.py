"""Transformer Engine 2.19, recorded from 2.19.0."""

from megatron_lynx.apply.transformer_engine.release import ATTENTION, EngineRelease

TE_2_19 = EngineRelease(
    version="2.19",
    norm_node="_LayerNormLinearBackward",
    norm_slots=(5, 6, 7),
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "6f8abc712597506c",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "047667a9adc7d8fb",
        "transformer_engine.pytorch.module.linear:_linear_forward_impl": "bffbdb5c9a54d1d6",
        "transformer_engine.pytorch.module.linear:_linear_setup_ctx": "8384a32bc0bb3e67",
        "transformer_engine.pytorch.module.linear:_linear_backward": "83d987c1fb0e5516",
        "transformer_engine.pytorch.module.linear:Linear.forward": "5bfc624e1061c731",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "f0370b1b812ac226",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "b0ad15c67f82edcd",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "a533c99f35825e1c",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "ea4e68afff0922d2",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "b91c0ef4d8350916",
        "transformer_engine.pytorch.module._common:apply_normalization": "8e3428cbd7105905",
        "transformer_engine.pytorch.distributed:gather_along_first_dim": "7dc99a86a131fdfe",
        "transformer_engine.pytorch.distributed:reduce_scatter_along_first_dim": "9e2a3960fb941ef3",
        "transformer_engine.pytorch.distributed:allreduce": "1277065eff59a793",
        "transformer_engine.pytorch.utils:cast_if_needed": "2f9ec48ef2175197",
        "transformer_engine.pytorch.utils:clear_tensor_data": "69610ac5ca257edf",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "33a2cb9779928cd4",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "d64737b120122b3f",
        f"{ATTENTION}.backends:FlashAttention.forward": "2fc325f2cdaae06a",
        f"{ATTENTION}.backends:FusedAttention.forward": "0144740c9502b43f",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "86aeb9ccf5863185",
    },
)
