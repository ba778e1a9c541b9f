"""The source text that hooks rely on in megatron-core, by release, so that a plan is refused where Megatron reads otherwise.

The first release lists all functions, every later one those that read otherwise than in the release before, or that came with it.
So the history of a function is found by looking for its name. `scripts/record_release.py` drafts the next release.
"""

from megatron_lynx.apply.releases.release import GONE, Release

LANGUAGE = "megatron.core.models.common.language_module.language_module:LanguageModule"

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
    only_with={
        "experts": {
            "megatron.core.transformer.moe.moe_layer:MoELayer.forward": "0ce911f8680b0b10",
            "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler": "6d2a2d84672f1ac8",
            "megatron.core.transformer.moe.router:TopKRouter.forward": "b1b0027d1432cbee",
            "megatron.core.transformer.moe.moe_layer:MoELayer.router_and_preprocess": "4814068632511ffa",
            "megatron.core.transformer.moe.moe_layer:MoELayer.dispatch": "07791dd57f94ff8b",
            "megatron.core.transformer.moe.moe_layer:MoELayer.shared_experts_compute": "a13e64cb77068b2f",
            "megatron.core.transformer.moe.moe_layer:MoELayer.routed_experts_compute": "9e06fab9ede53d9f",
            "megatron.core.transformer.moe.moe_layer:MoELayer.combine": "0357ff0bb33c4648",
            "megatron.core.transformer.moe.experts:SequentialMLP.forward": "44328dbfacf5d094",
            "megatron.core.transformer.moe.experts:TEGroupedMLP.forward": "6993247cf2ba598c",
            "megatron.core.transformer.moe.shared_experts:SharedExpertMLP.forward": "97edaf315b20acba",
            "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.dispatch_preprocess": "c8bb8d2f56e35ed9",
            "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.token_dispatch": "30f06d726b4b4704",
            "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.dispatch_postprocess": "78b473d56be996ec",
            "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.combine_preprocess": "9b41813d5892c648",
            "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.token_combine": "7121227189005485",
            "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.combine_postprocess": "df74ed308a58d4e7",
            "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.dispatch_preprocess": "924dad9fa63c99f1",
            "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.token_dispatch": "a0738e802d89b516",
            "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.dispatch_postprocess": "49eba6d1535526cb",
            "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.combine_preprocess": "b9052592ac4aa8d4",
            "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.token_combine": "465c54982e8e295b",
            "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.combine_postprocess": "ce1c79ce3769810b",
            "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.dispatch_preprocess": "ceb66c80f4ccf7a2",
            "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.token_dispatch": "751ab6056885d19b",
            "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.dispatch_postprocess": "5b6f62f4395c6925",
            "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.combine_preprocess": "d772698078cc4bae",
            "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.token_combine": "8149922b9390e9fc",
            "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.combine_postprocess": "729b2141f8c4bf3c",
            "megatron.core.transformer.moe.fused_a2a:FusedDispatch": "984b8edad2110e01",
            "megatron.core.transformer.moe.fused_a2a:FusedCombine": "96be3bd564551d50",
        },
        "latent": {
            "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.forward": "71d60bfea63bd2e3",
            "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors": "b4e522b0b5abe19b",
            "megatron.core.tensor_parallel.mappings:gather_from_tensor_model_parallel_region": "b1f2515482bfd8b8",
            "megatron.core.tensor_parallel.mappings:gather_from_sequence_parallel_region": "157735a551a8e564",
            "megatron.core.tensor_parallel.mappings:scatter_to_sequence_parallel_region": "1a0631dfffd94043",
            "megatron.core.tensor_parallel.mappings:_gather_along_last_dim": "78507d5543935a72",
            "megatron.core.tensor_parallel.mappings:_split_along_first_dim": "0c1e41ac726e8e67",
            "megatron.core.tensor_parallel.mappings:_split_along_last_dim": "6fde549a71823fa5",
        },
        "head": {
            "megatron.core.models.gpt.gpt_model:GPTModel.forward": "0047d48b08604202",
            "megatron.core.models.gpt.gpt_model:GPTModel._postprocess": "6e0fe65f619523fa",
            f"{LANGUAGE}.compute_language_model_loss": "01ec0b6356cd6fc0",
            "megatron.core.tensor_parallel.layers:ColumnParallelLinear._forward_impl": "6042a461a2e654e9",
            "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce": "a7dce2d67feac8f0",
            "megatron.core.tensor_parallel.mappings:copy_to_tensor_model_parallel_region": "31582c91bd424e80",
            "megatron.core.tensor_parallel.mappings:gather_from_sequence_parallel_region": "157735a551a8e564",
            "megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy": "b81360061852c36b",
            "megatron.core.fusions.fused_cross_entropy:_VocabParallelCrossEntropy": "caa71cc11dc48e78",
        },
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
    te={
        "megatron.core.extensions.transformer_engine:TELinear.forward": "25c929fd36999f38",
        "megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward": "c1efb1ce3dd88e91",
        "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward": "52433b62e8a3fda4",
    },
    experts={
        "megatron.core.transformer.moe.moe_layer:MoELayer.forward": "3544478a67584d91",
        "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler": "2eedb2e604cedee5",
        "megatron.core.transformer.moe.router:TopKRouter.forward": "c4642459d3496ff7",
        "megatron.core.transformer.moe.moe_layer:MoELayer.router_and_preprocess": "4738715d4e73c51b",
        "megatron.core.transformer.moe.moe_layer:MoELayer.dispatch": "5afd894368db0d25",
        "megatron.core.transformer.moe.moe_layer:MoELayer.shared_experts_compute": "1a9bfef80fa4157a",
        "megatron.core.transformer.moe.moe_layer:MoELayer.routed_experts_compute": "a2209c9540242193",
        "megatron.core.transformer.moe.moe_layer:MoELayer.combine": "f0f883a99bac785b",
        "megatron.core.transformer.moe.experts:SequentialMLP.forward": "2f6a645f4f9ce7d7",
        "megatron.core.transformer.moe.experts:TEGroupedMLP.forward": "e39fee54088389d6",
        "megatron.core.transformer.moe.shared_experts:SharedExpertMLP.forward": "0a65756c6b04dec2",
        "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.dispatch_preprocess": "9602d5874baf145b",
        "megatron.core.transformer.moe.moe_layer:MoELayer.route": "15b4e6cc0bc63937",
        "megatron.core.transformer.moe.moe_layer:MoELayer.preprocess": "825cfd022c67dd30",
        "megatron.core.transformer.moe.moe_layer:MoELayer.postprocess": "77d706ef87314f97",
        "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.dispatch_preprocess": "26b7a4234b058710",
        "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.token_dispatch": "abc52784450eb835",
        "megatron.core.transformer.moe.fused_a2a:HybridEPDispatch": "a6fc3d771615b328",
        "megatron.core.transformer.moe.fused_a2a:HybridEPCombine": "e0d81711eb523d6b",
    },
    latent={
        "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.forward": "49a5a948c69c08c7",
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors": "d884dd41c755342e",
    },
    head={
        "megatron.core.models.gpt.gpt_model:GPTModel.forward": "a9578ed8f6fe071f",
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess": "a5f7de0bfb1cad97",
        f"{LANGUAGE}.compute_language_model_loss": "86cf8e890a0f9c9b",
    },
    overlapped={
        "megatron.core.pipeline_parallel.combined_1f1b:combined_1f1b_schedule_for_no_pipelining": "5e09f2fd73122345",
        "megatron.core.pipeline_parallel.combined_1f1b:combined_1f1b_schedule_for_interleaved_pipelining": "386c7a2477784817",
        "megatron.core.pipeline_parallel.combined_1f1b:combined_forward_backward_step": "734d6f8080fdd7d2",
        "megatron.core.pipeline_parallel.utils:ScheduleNode": "c4ba546f72c511ce",
        "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan.run": "6cd10e147f2fcec9",
        "megatron.core.models.common.model_chunk_schedule_plan:TransformerModelChunkSchedulePlan.run": "66912b57740199c8",
        "megatron.core.models.gpt.fine_grained_callables:build_transformer_layer_callables": "ac5477ceae7bf0ef",
        "megatron.core.models.gpt.fine_grained_callables:TransformerLayerNode": "d915c5cb082a6336",
        "megatron.core.models.gpt.fine_grained_callables:should_free_input": "62826425f915dee3",
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
    experts={
        "megatron.core.transformer.moe.moe_layer:MoELayer.forward": "e337479cc4f53280",
        "megatron.core.transformer.moe.router:TopKRouter.forward": "506f0c26dedb8d88",
        "megatron.core.transformer.moe.moe_layer:MoELayer.shared_experts_compute": "a08172a0c5fd747d",
        "megatron.core.transformer.moe.moe_layer:MoELayer.routed_experts_compute": "0b04ee398ab6801b",
        "megatron.core.transformer.moe.experts:TEGroupedMLP.forward": "7daae5b4bf71a5e3",
        "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.dispatch_postprocess": "234d7f1092187f32",
        "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.dispatch_preprocess": "3b11d1747084a908",
        "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.token_dispatch": "1828d60c95208ce5",
        "megatron.core.transformer.moe.fused_a2a:HybridEPDispatch": "b3bbc5567031100c",
        "megatron.core.transformer.moe.fused_a2a:HybridEPCombine": "1cbd90811fcd0e6a",
    },
    latent={
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors": "bf7980d17485b537",
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention._qkv_down_projection": "6e1c7d106c8c3ac1",
    },
    head={
        "megatron.core.models.gpt.gpt_model:GPTModel.forward": "8f1135aa133540ce",
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess": "4ae592221f4fd816",
        "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce": "68223b5e19c86d24",
        f"{LANGUAGE}._scale_logits": "8eb5ca0ddad585c9",
    },
    hybrid={
        "megatron.core.transformer.transformer_layer:MoETransformerLayer._forward_mlp": "71a44c4d7a842a17",
    },
    overlapped={
        "megatron.core.pipeline_parallel.combined_1f1b:combined_forward_backward_step": "fc58e7c5bc2867d5",
        "megatron.core.pipeline_parallel.utils:ScheduleNode": "c8cb912f9252e7a7",
        "megatron.core.models.gpt.fine_grained_callables:build_transformer_layer_callables": "c2e87e24db2266a9",
        "megatron.core.models.gpt.fine_grained_callables:TransformerLayerNode": "dfed21a79cee1a54",
        "megatron.core.models.gpt.fine_grained_callables:should_free_input": "31909c167fd5df72",
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
    te={
        "megatron.core.extensions.transformer_engine:TELinear.forward": "974c68745cfa3e7b",
    },
    experts={
        "megatron.core.transformer.moe.moe_layer:MoELayer.forward": "6a2a1313d9e22c44",
        "megatron.core.transformer.moe.moe_layer:MoELayer.dispatch": "607c247175bdeb2e",
        "megatron.core.transformer.moe.moe_layer:MoELayer.shared_experts_compute": "b7f4f42a3ba0e365",
        "megatron.core.transformer.moe.moe_layer:MoELayer.routed_experts_compute": "d5f474eadfb6f465",
        "megatron.core.transformer.moe.experts:TEGroupedMLP.forward": "5c1b49e9f7efbcc2",
        "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.token_dispatch": "c8cb3412b4f4fb00",
        "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.dispatch_postprocess": "3db3d062acb809ce",
        "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.token_combine": "c2cee5994d363b3a",
        "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.combine_postprocess": "3af5e8ad53258f98",
        "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.token_dispatch": "a5523c98ec89e5cd",
        "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.token_combine": "c5bd9124bfe12a6e",
        "megatron.core.transformer.moe.token_dispatcher:MoEFlexTokenDispatcher.combine_postprocess": "d77a7a53bfabc59b",
        "megatron.core.transformer.moe.moe_layer:MoELayer.preprocess": "c96b986108352679",
        "megatron.core.transformer.moe.moe_layer:MoELayer.postprocess": "af955e3082552662",
        "megatron.core.transformer.moe.fused_a2a:HybridEPDispatch": "b5af3f1e83d12ce0",
    },
    latent={
        "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.forward": "0e7f3882003575b9",
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors": "b57ff9fdfb152d25",
        "megatron.core.transformer.multi_latent_attention:MultiLatentAttention._run_core_attention": "157911d9c9458347",
    },
    head={
        "megatron.core.models.gpt.gpt_model:GPTModel.forward": "ecf2ffcb318347f6",
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess": "de4dbfb0d7d41088",
        f"{LANGUAGE}.compute_language_model_loss": "7ab354400f220b50",
    },
    hybrid={
        "megatron.core.transformer.transformer_layer:MoETransformerLayer._forward_mlp": "4a944ed851f25cc2",
        "megatron.core.models.hybrid.hybrid_block:HybridStack.forward": "debd25cfb08e553d",
    },
    overlapped={
        "megatron.core.pipeline_parallel.combined_1f1b:combined_1f1b_schedule_for_no_pipelining": "aad4a9e5fa82f324",
        "megatron.core.pipeline_parallel.combined_1f1b:combined_1f1b_schedule_for_interleaved_pipelining": "40830fcea0b310c5",
        "megatron.core.pipeline_parallel.combined_1f1b:combined_forward_backward_step": "0960241d12114a70",
        "megatron.core.pipeline_parallel.utils:ScheduleNode": "3b5ce3e8d183a5a8",
        "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan.run": "bab933c6c16c2a32",
        "megatron.core.models.common.model_chunk_schedule_plan:TransformerModelChunkSchedulePlan.run": "6dedbd15e96a3d01",
        "megatron.core.models.gpt.fine_grained_callables:build_transformer_layer_callables": "c26ff92ddb6e9697",
        "megatron.core.models.gpt.fine_grained_callables:TransformerLayerNode": "2b75566ab83a1107",
        "megatron.core.models.gpt.fine_grained_callables:should_free_input": "432783ee669cd004",
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
    te={
        "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward": "83470b9732d24e90",
    },
    experts={
        "megatron.core.transformer.moe.moe_layer:MoELayer.routed_experts_compute": "2cc410c1d5786e62",
        "megatron.core.transformer.moe.experts:TEGroupedMLP.forward": "a56ec1eb78c10de2",
    },
    latent={
        "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.forward": "b0d8e69892f35651",
        "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors": "e19fa46a2a0b1b23",
    },
    head={
        "megatron.core.models.gpt.gpt_model:GPTModel._postprocess": "41700c5f809c197c",
        f"{LANGUAGE}.compute_language_model_loss": "cfdd820917a28309",
        "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce": "e8826ff1c83eb53c",
        "megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy": "ee9c3e36b0e76bac",
    },
    hybrid={
        "megatron.core.transformer.transformer_layer:MoETransformerLayer._forward_mlp": "4e2bba56ad0e7d51",
    },
    overlapped={
        "megatron.core.pipeline_parallel.combined_1f1b:combined_forward_backward_step": "c88509af0f94978d",
        "megatron.core.pipeline_parallel.utils:ScheduleNode": "7a62dc8735f135d3",
        "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan.run": "6a09cc81f2faf45a",
        "megatron.core.models.common.model_chunk_schedule_plan:TransformerModelChunkSchedulePlan.run": "75d8dae9c8209a64",
        "megatron.core.models.gpt.fine_grained_callables:build_transformer_layer_callables": "f7cfa30c9599f312",
        "megatron.core.models.gpt.fine_grained_callables:TransformerLayerNode": GONE,
        "megatron.core.models.gpt.fine_grained_callables:should_free_input": GONE,
        "megatron.core.models.common.utils:TransformerLayerNode": "075b03a6e3d65ebf",
        "megatron.core.models.common.utils:should_free_input": "85f4bb5b4a46dc6e",
    },
)

CORE_0_17 = CORE_0_17.reading_also(
    {  # 0.17.0: as in 0.16
        name: CORE_0_16.only_with["experts"][name]
        for name in (f"megatron.core.transformer.moe.fused_a2a:HybridEP{what}" for what in ("Dispatch", "Combine"))
    }
)

CORE_0_19 = CORE_0_19.reading_also(
    {  # 0.19.0: names its context of FP8 otherwise
        "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan.run": "ac5a97383bae7ff9",
    }
)

KNOWN: dict[str, Release] = {release.version: release for release in (CORE_0_15, CORE_0_16, CORE_0_17, CORE_0_18, CORE_0_19)}
