"""Transformer Engine 2.10, recorded from 2.10.0."""

from megatron_lynx.apply.transformer_engine.release import ATTENTION, EngineRelease

TE_2_10 = EngineRelease(
    version="2.10",
    norm_node="_LayerNormLinearBackward",
    norm_slots=(5, 6, 7),
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "3b7efc21d0bec2f3",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "91c4fbdf4303695d",
        "transformer_engine.pytorch.module.linear:Linear.forward": "e67a92ecdd3d48f1",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "e1a31190bd9afc29",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "38ed5418ca8dcd5a",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "ae369bd483ce0d77",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "b41b859127453b58",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "8313d75860ccf2b7",
        "transformer_engine.pytorch.module._common:apply_normalization": "8e3428cbd7105905",
        "transformer_engine.pytorch.distributed:gather_along_first_dim": "6d7b607422f781a3",
        "transformer_engine.pytorch.distributed:reduce_scatter_along_first_dim": "1475d547f1ba4ff0",
        "transformer_engine.pytorch.distributed:allreduce": "1277065eff59a793",
        "transformer_engine.pytorch.utils:cast_if_needed": "2f9ec48ef2175197",
        "transformer_engine.pytorch.utils:clear_tensor_data": "69610ac5ca257edf",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "b19796fae1e38c95",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "9d3aee29f99aa50d",
        f"{ATTENTION}.backends:FlashAttention.forward": "52d7105cb2b98860",
        f"{ATTENTION}.backends:FusedAttention.forward": "017798065625d71d",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "e8883367519e62f3",
    },
)
