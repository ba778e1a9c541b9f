"""The source text that hooks rely on in megatron-core, by release, so that a plan is refused where Megatron reads otherwise.

The first release lists all functions, every later one those that read otherwise than in the release before, or that came with it.
So the history of a function is found by looking for its name. `scripts/record_release.py` drafts the next release.
"""

from megatron_lynx.apply.releases.release import Release

CORE_0_15 = Release(  # recorded from 0.15.3
    version="0.15",
    fingerprints={
        "megatron.core.transformer.transformer_layer:TransformerLayer.forward": "e68bfa996ce26549",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention": "d5e7215cce5728c2",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_mlp": "80551fecdebd60dc",
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

CORE_0_16 = CORE_0_15.then(  # recorded from 0.16.1
    "0.16",
    fingerprints={
        "megatron.core.transformer.transformer_layer:TransformerLayer.forward": "a858d1d13f9f323e",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention": "2e3a4131bea0ba89",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_mlp": "9125341d2e12d7f0",
        "megatron.core.transformer.transformer_block:TransformerBlock.forward": "f72b6c393aa44621",
        "megatron.core.transformer.attention:Attention.forward": "0e779c3e4ce2b594",
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors": "c2416ff2504e51b3",
        "megatron.core.transformer.mlp:MLP.forward": "c68406f3ca95514d",
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward": "1450046fe34ea330",
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward": "3f9d98f23b319c03",
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker": "0194c15fce9418b7",
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining": "84399467bcc06296",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "ecf7d69308cda660",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving": "bd10736079d7ed41",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate": "a902480caa75a260",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_post_mlp": "0ee15132e4bb71cd",
    },
    beside_te={
        "megatron.core.extensions.transformer_engine:TELinear.forward": "25c929fd36999f38",
        "megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward": "c1efb1ce3dd88e91",
        "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward": "52433b62e8a3fda4",
    },
    beside_experts={
        "megatron.core.transformer.moe.moe_layer:MoELayer.forward": "3544478a67584d91",
        "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler": "2eedb2e604cedee5",
        "megatron.core.transformer.moe.router:TopKRouter.forward": "c4642459d3496ff7",
    },
)

CORE_0_17 = CORE_0_16.then(  # recorded from 0.17.1
    "0.17",
    fingerprints={
        "megatron.core.transformer.transformer_layer:TransformerLayer.forward": "bdb067023a17a435",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention": "84325c3feef8fec2",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_mlp": "0bab7b2854eefecf",
        "megatron.core.transformer.transformer_block:TransformerBlock.forward": "c1899653f7f336da",
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors": "53c73e30c0289e33",
        "megatron.core.transformer.mlp:MLP.forward": "bce28c9dcc3a2555",
        "megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func": "857b3e1b3474d514",
        "megatron.core.tensor_parallel.layers:RowParallelLinear.forward": "959fc4b4dbb946f6",
        "megatron.core.pipeline_parallel.schedules:backward_step": "435628e2479e62f2",
        "megatron.core.pipeline_parallel.schedules:deallocate_output_tensor": "ec45aab59f2784a1",
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining": "c86c3a0d6fb4551f",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "79bb2ba211d57422",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving": "45dd6edc2bf81d9f",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_post_mlp": "fcd0cc5a2f5110df",
    },
    beside_experts={
        "megatron.core.transformer.moe.moe_layer:MoELayer.forward": "e337479cc4f53280",
        "megatron.core.transformer.moe.router:TopKRouter.forward": "506f0c26dedb8d88",
    },
)

CORE_0_18 = CORE_0_17.then(  # recorded from 0.18.2
    "0.18",
    fingerprints={
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention": "e4ad2634e735401b",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_mlp": "03f314c685ca373e",
        "megatron.core.transformer.transformer_block:TransformerBlock.forward": "e20defb813f62690",
        "megatron.core.transformer.attention:Attention.forward": "3c1526e57c197f2d",
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward": "8de69f2acd5f7e9b",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward": "7bc42ef6c3ffe8f0",
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining": "897d736956bfbd1f",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "c8fd558b6fdcd51b",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving": "450e85c2b5211399",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_post_mlp": "9c02878bfe37cca1",
    },
    beside_te={
        "megatron.core.extensions.transformer_engine:TELinear.forward": "974c68745cfa3e7b",
    },
    beside_experts={
        "megatron.core.transformer.moe.moe_layer:MoELayer.forward": "6a2a1313d9e22c44",
    },
)

CORE_0_19 = CORE_0_18.then(  # recorded from 0.19.2
    "0.19",
    fingerprints={
        "megatron.core.transformer.transformer_layer:TransformerLayer.forward": "bdfecfb342cb345b",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention": "257c7c162bd0e11d",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_mlp": "04ae2df5a64af9d6",
        "megatron.core.transformer.attention:Attention.forward": "b144e903f3ca6d8f",
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward": "dac5d6cfeaa44ba6",
        "megatron.core.tensor_parallel.layers:RowParallelLinear.forward": "d98cea58261aef07",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.forward": "61057afc516f6987",
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward": "0a5b564dd254cb93",
        "megatron.core.tensor_parallel.mappings:_reduce": "81d65e94067cf147",
        "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining": "b52848b05720fd61",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": "772d6b7d81825e7a",
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving": "091263d1c27eb438",
        "megatron.core.transformer.transformer_layer:TransformerLayer._forward_post_mlp": "f767752242219807",
    },
    beside_te={
        "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward": "83470b9732d24e90",
    },
)

KNOWN: dict[str, Release] = {release.version: release for release in (CORE_0_15, CORE_0_16, CORE_0_17, CORE_0_18, CORE_0_19)}
