"""Transformer Engine 2.9, recorded from 2.9.0."""

from megatron_lynx.apply.transformer_engine.release import ATTENTION, EngineRelease

TE_2_9 = EngineRelease(
    version="2.9",
    norm_node="_LayerNormLinearBackward",
    norm_slots=(5, 6, 7),
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "245576fdd7d6c05d",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "9643c73ad24e7a41",
        "transformer_engine.pytorch.module.linear:Linear.forward": "52f0e33730796aa4",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "0e2792ec0e77e5a1",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "61bbcf0ae9241f0f",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "897c8c7d5cc2009b",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "6a54930630b1999a",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "8313d75860ccf2b7",
        "transformer_engine.pytorch.module._common:apply_normalization": "8e3428cbd7105905",
        "transformer_engine.pytorch.distributed:gather_along_first_dim": "6d7b607422f781a3",
        "transformer_engine.pytorch.distributed:reduce_scatter_along_first_dim": "1475d547f1ba4ff0",
        "transformer_engine.pytorch.distributed:allreduce": "1277065eff59a793",
        "transformer_engine.pytorch.utils:cast_if_needed": "2f9ec48ef2175197",
        "transformer_engine.pytorch.utils:clear_tensor_data": "69610ac5ca257edf",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "ed91b6e4439c9316",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "9d3aee29f99aa50d",
        f"{ATTENTION}.backends:FlashAttention.forward": "436b80211b22da7f",
        f"{ATTENTION}.backends:FusedAttention.forward": "017798065625d71d",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "ba2a11922cb79f1c",
    },
)
