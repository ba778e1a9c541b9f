"""megatron-core 0.19, recorded from 0.19.2."""

from megatron_lynx.apply.releases.release import Release

CORE_0_19 = Release(
    version="0.19",
    fingerprints={
        "megatron.core.transformer.transformer_layer:TransformerLayer.forward": "bdfecfb342cb345b",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention": "257c7c162bd0e11d",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_mlp": "04ae2df5a64af9d6",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_post_mlp": "f767752242219807",
        "megatron.core.transformer.transformer_block:TransformerBlock.forward": "e20defb813f62690",
        "megatron.core.transformer.attention:Attention.forward": "b144e903f3ca6d8f",
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors": "53c73e30c0289e33",
        "megatron.core.transformer.mlp:MLP.forward": "bce28c9dcc3a2555",
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward": "1450046fe34ea330",
        "megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func": "857b3e1b3474d514",
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward": "dac5d6cfeaa44ba6",
        "megatron.core.tensor_parallel.layers:RowParallelLinear.forward": "d98cea58261aef07",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.forward": "61057afc516f6987",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward": "0a5b564dd254cb93",
        "megatron.core.tensor_parallel.mappings:_reduce": "81d65e94067cf147",
        "megatron.core.tensor_parallel.mappings:_gather_along_first_dim": "44633fe36d60a51f",
        "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim": "7322068fab71d319",
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker": "0194c15fce9418b7",
        "megatron.core.pipeline_parallel.schedules:forward_step": "24c526af44458ac2",
        "megatron.core.pipeline_parallel.schedules:backward_step": "435628e2479e62f2",
        "megatron.core.pipeline_parallel.schedules:deallocate_output_tensor": "ec45aab59f2784a1",
        "megatron.core.pipeline_parallel.schedules:custom_backward": "134012de6fb7d096",
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining": "b52848b05720fd61",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "772d6b7d81825e7a",
        "megatron.core.pipeline_parallel.schedules:get_pp_rank_microbatches": "78a8e057bdbb4e24",
        "megatron.core.pipeline_parallel.schedules:get_schedule_table": "158bd24923729b4e",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving": "091263d1c27eb438",
        "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops": "20995746a48170ca",
        "megatron.core.pipeline_parallel.p2p_communication:_batched_p2p_ops": "4b0901807501c561",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate": "a902480caa75a260",
    },
    beside_te={
        "megatron.core.extensions.transformer_engine:TELinear.forward": "974c68745cfa3e7b",
        "megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward": "c1efb1ce3dd88e91",
        "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward": "83470b9732d24e90",
    },
    beside_experts={
        "megatron.core.transformer.moe.moe_layer:MoELayer.forward": "6a2a1313d9e22c44",
        "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler": "2eedb2e604cedee5",
        "megatron.core.transformer.moe.router:TopKRouter.forward": "506f0c26dedb8d88",
    },
)
