"""megatron-core 0.15, recorded from 0.15.3."""

from megatron_lynx.apply.releases.release import Release

CORE_0_15 = Release(
    version="0.15",
    fingerprints={
        "megatron.core.transformer.transformer_layer:TransformerLayer.forward": "e68bfa996ce26549",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention": "d5e7215cce5728c2",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_mlp": "80551fecdebd60dc",
        # megatron.core.transformer.transformer_layer:TransformerLayer._forward_post_mlp: not in this release
        "megatron.core.transformer.transformer_block:TransformerBlock.forward": "a0447f8a50c513ab",
        "megatron.core.transformer.attention:Attention.forward": "4ba62027d36dec34",
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors": "f1c61e21bcff9cb8",
        "megatron.core.transformer.mlp:MLP.forward": "a841b8192f18e486",
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward": "95b0a0dcd2e51a8c",
        "megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func": "412411216297327c",
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward": "972f28bf98e74de3",
        "megatron.core.tensor_parallel.layers:RowParallelLinear.forward": "2148db9855a3b204",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.forward": "5ee1c1ef5c5f1e5e",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward": "b50b2ea4a1c90270",
        "megatron.core.tensor_parallel.mappings:_reduce": "d8dac1bff328972c",
        "megatron.core.tensor_parallel.mappings:_gather_along_first_dim": "44633fe36d60a51f",
        "megatron.core.tensor_parallel.mappings:_reduce_scatter_along_first_dim": "7322068fab71d319",
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker": "39f624ca7e5cd381",
        "megatron.core.pipeline_parallel.schedules:forward_step": "24c526af44458ac2",
        "megatron.core.pipeline_parallel.schedules:backward_step": "6ac4aa596b1b6261",
        "megatron.core.pipeline_parallel.schedules:deallocate_output_tensor": "13903f30b90cefe7",
        "megatron.core.pipeline_parallel.schedules:custom_backward": "134012de6fb7d096",
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining": "6915c8b33db4fcf7",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "03757d1066dc7e52",
        "megatron.core.pipeline_parallel.schedules:get_pp_rank_microbatches": "78a8e057bdbb4e24",
        "megatron.core.pipeline_parallel.schedules:get_schedule_table": "158bd24923729b4e",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving": "40a0803de2d80051",
        "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops": "20995746a48170ca",
        "megatron.core.pipeline_parallel.p2p_communication:_batched_p2p_ops": "4b0901807501c561",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate": "ae2076579364bb1e",
    },
    beside_experts={
        "megatron.core.transformer.moe.moe_layer:MoELayer.forward": "0ce911f8680b0b10",
        "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler": "6d2a2d84672f1ac8",
        "megatron.core.transformer.moe.router:TopKRouter.forward": "b1b0027d1432cbee",
    },
)
