"""megatron-core 0.18, recorded from 0.18.2."""

from megatron_lynx.apply.releases.release import Release

CORE_0_18 = Release(
    version="0.18",
    fingerprints={
        "megatron.core.transformer.transformer_layer:TransformerLayer.forward": "bdb067023a17a435",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention": "e4ad2634e735401b",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_mlp": "03f314c685ca373e",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_post_mlp": "9c02878bfe37cca1",
        "megatron.core.transformer.transformer_block:TransformerBlock.forward": "e20defb813f62690",
        "megatron.core.transformer.attention:Attention.forward": "3c1526e57c197f2d",
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors": "53c73e30c0289e33",
        "megatron.core.transformer.mlp:MLP.forward": "bce28c9dcc3a2555",
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward": "1450046fe34ea330",
        "megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func": "857b3e1b3474d514",
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward": "8de69f2acd5f7e9b",
        "megatron.core.tensor_parallel.layers:RowParallelLinear.forward": "959fc4b4dbb946f6",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.forward": "5ee1c1ef5c5f1e5e",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward": "7bc42ef6c3ffe8f0",
        "megatron.core.tensor_parallel.mappings:_reduce": "d8dac1bff328972c",
        "megatron.core.tensor_parallel.mappings:_gather_along_first_dim": "44633fe36d60a51f",
        "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim": "7322068fab71d319",
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker": "0194c15fce9418b7",
        "megatron.core.pipeline_parallel.schedules:forward_step": "24c526af44458ac2",
        "megatron.core.pipeline_parallel.schedules:backward_step": "435628e2479e62f2",
        "megatron.core.pipeline_parallel.schedules:deallocate_output_tensor": "ec45aab59f2784a1",
        "megatron.core.pipeline_parallel.schedules:custom_backward": "134012de6fb7d096",
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining": "897d736956bfbd1f",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "c8fd558b6fdcd51b",
        "megatron.core.pipeline_parallel.schedules:get_pp_rank_microbatches": "78a8e057bdbb4e24",
        "megatron.core.pipeline_parallel.schedules:get_schedule_table": "158bd24923729b4e",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving": "450e85c2b5211399",
        "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops": "20995746a48170ca",
        "megatron.core.pipeline_parallel.p2p_communication:_batched_p2p_ops": "4b0901807501c561",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate": "a902480caa75a260",
    },
    beside_te={
        "megatron.core.extensions.transformer_engine:TELinear.forward": "974c68745cfa3e7b",
        "megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward": "c1efb1ce3dd88e91",
        "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward": "52433b62e8a3fda4",
    },
    beside_experts={
        "megatron.core.transformer.moe.moe_layer:MoELayer.forward": "6a2a1313d9e22c44",
        "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler": "2eedb2e604cedee5",
        "megatron.core.transformer.moe.router:TopKRouter.forward": "506f0c26dedb8d88",
    },
)
