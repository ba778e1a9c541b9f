"""megatron-core 0.17, recorded from 0.17.1."""

from megatron_lynx.apply.releases.release import Release

CORE_0_17 = Release(
    version="0.17",
    fingerprints={
        "megatron.core.transformer.transformer_layer:TransformerLayer.forward": "bdb067023a17a435",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention": "84325c3feef8fec2",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_mlp": "0bab7b2854eefecf",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_post_mlp": "fcd0cc5a2f5110df",
        "megatron.core.transformer.transformer_block:TransformerBlock.forward": "c1899653f7f336da",
        "megatron.core.transformer.attention:Attention.forward": "0e779c3e4ce2b594",
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors": "53c73e30c0289e33",
        "megatron.core.transformer.mlp:MLP.forward": "bce28c9dcc3a2555",
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward": "1450046fe34ea330",
        "megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func": "857b3e1b3474d514",
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward": "3f9d98f23b319c03",
        "megatron.core.tensor_parallel.layers:RowParallelLinear.forward": "959fc4b4dbb946f6",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.forward": "5ee1c1ef5c5f1e5e",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward": "b50b2ea4a1c90270",
        "megatron.core.tensor_parallel.mappings:_reduce": "d8dac1bff328972c",
        "megatron.core.tensor_parallel.mappings:_gather_along_first_dim": "44633fe36d60a51f",
        "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim": "7322068fab71d319",
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker": "0194c15fce9418b7",
        "megatron.core.pipeline_parallel.schedules:forward_step": "24c526af44458ac2",
        "megatron.core.pipeline_parallel.schedules:backward_step": "435628e2479e62f2",
        "megatron.core.pipeline_parallel.schedules:deallocate_output_tensor": "ec45aab59f2784a1",
        "megatron.core.pipeline_parallel.schedules:custom_backward": "134012de6fb7d096",
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining": "c86c3a0d6fb4551f",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "79bb2ba211d57422",
        "megatron.core.pipeline_parallel.schedules:get_pp_rank_microbatches": "78a8e057bdbb4e24",
        "megatron.core.pipeline_parallel.schedules:get_schedule_table": "158bd24923729b4e",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving": "45dd6edc2bf81d9f",
        "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops": "20995746a48170ca",
        "megatron.core.pipeline_parallel.p2p_communication:_batched_p2p_ops": "4b0901807501c561",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate": "a902480caa75a260",
    },
    beside_te={
        "megatron.core.extensions.transformer_engine:TELinear.forward": "25c929fd36999f38",
        "megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward": "c1efb1ce3dd88e91",
        "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward": "52433b62e8a3fda4",
    },
    beside_experts={
        "megatron.core.transformer.moe.moe_layer:MoELayer.forward": "e337479cc4f53280",
        "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler": "2eedb2e604cedee5",
        "megatron.core.transformer.moe.router:TopKRouter.forward": "506f0c26dedb8d88",
    },
)
