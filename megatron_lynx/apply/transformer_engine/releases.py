"""The source text that hooks rely on in Transformer Engine, by release, so that a plan is refused where it reads otherwise.

The first release lists all functions, every later one those that read otherwise than in the release before, came with it, or are
gone. So the history of a function is found by looking for its name. `scripts/record_release.py transformer_engine` drafts the
next release.
"""

from megatron_lynx.apply.releases.release import GONE
from megatron_lynx.apply.transformer_engine.release import ATTENTION, TeRelease

TE_2_9 = TeRelease(  # recorded from 2.9.0
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
    only_with={
        "fp8": {
            "transformer_engine.pytorch.quantization:FP8GlobalStateManager.get_autocast_state": "432990c77de8ae37",
            "transformer_engine.pytorch.quantization:FP8GlobalStateManager.set_autocast_state": "b7da66f77f65ef4f",
            "transformer_engine.pytorch.quantization:FP8GlobalStateManager.is_first_fp8_module": "cc2e6adf1546b527",
            "transformer_engine.pytorch.quantization:FP8GlobalStateManager.add_fp8_tensors_to_global_buffer": "d1d1f3d6569db3f4",
            "transformer_engine.pytorch.quantization:DelayedScalingRecipeState": "8612dfde0ebc4bb8",
            "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.init_fp8_metadata": "ca85d90ad99fb713",
            "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.get_weight_workspace": "91cf0005ef92d9a7",
            "transformer_engine.pytorch.module.linear:Linear._get_quantizers": "4bce3d2c674c3386",
            "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear._get_quantizers": "62498e158fabe730",
            "transformer_engine.pytorch.tensor.float8_tensor:Float8Quantizer": "d32ae7ca1c640719",
            "transformer_engine.pytorch.tensor.float8_tensor:Float8CurrentScalingQuantizer": "55b0299ff1d804e2",
            "transformer_engine.pytorch.tensor.storage.float8_tensor_storage:Float8TensorStorage": "a8df90e129613aa3",
            "transformer_engine.pytorch.distributed:_all_gather_fp8": "50f5a489c8264dc6",
        },
        "grouped": {
            "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "95963e23370be521",
            "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.backward": "b26b53496eb8792c",
            "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.forward": "b2c67beead8bf4f5",
            "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.backward_dw": "90defe83d60414b6",
        },
        "fp4": {
            "transformer_engine.common.recipe:NVFP4BlockScaling": "fc2038c7d247593c",
            "transformer_engine.pytorch.quantization:NVFP4BlockScalingRecipeState": "4a012934e0107119",
            "transformer_engine.pytorch.tensor.nvfp4_tensor:NVFP4Quantizer": "b44479d916088df6",
            "transformer_engine.pytorch.distributed:_all_gather_nvfp4": "438b5924b9f5e3be",
        },
    },
)

TE_2_10 = TE_2_9.then(  # recorded from 2.10.0
    "2.10",
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "3b7efc21d0bec2f3",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "91c4fbdf4303695d",
        "transformer_engine.pytorch.module.linear:Linear.forward": "e67a92ecdd3d48f1",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "e1a31190bd9afc29",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "38ed5418ca8dcd5a",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "ae369bd483ce0d77",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "b41b859127453b58",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "b19796fae1e38c95",
        f"{ATTENTION}.backends:FlashAttention.forward": "52d7105cb2b98860",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "e8883367519e62f3",
    },
    fp8={
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.get_weight_workspace": "fb60c45e89338137",
        "transformer_engine.pytorch.module.linear:Linear._get_quantizers": "5fa83d02e9bab042",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear._get_quantizers": "f117c14b88506e35",
        "transformer_engine.pytorch.tensor.float8_tensor:Float8Quantizer": "d8e574e0c0382f54",
        "transformer_engine.pytorch.tensor.float8_tensor:Float8CurrentScalingQuantizer": "fb19bcc73ca48d7e",
        "transformer_engine.pytorch.tensor.storage.float8_tensor_storage:Float8TensorStorage": "a915334e8b4240bf",
        "transformer_engine.pytorch.distributed:_all_gather_fp8": "9ad2419a3217ef98",
    },
    grouped={
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "179ea4b5ad804227",
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.backward": "24e2da8dc54cec3b",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.forward": "3241151b427b31b3",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.backward_dw": "31889e9991d048b4",
    },
    fp4={
        "transformer_engine.common.recipe:NVFP4BlockScaling": "840a1f503b14424a",
        "transformer_engine.pytorch.tensor.nvfp4_tensor:NVFP4Quantizer": "91a98fef120a755a",
    },
)

TE_2_11 = TE_2_10.then(  # recorded from 2.11.0
    "2.11",
    fingerprints={
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "924c16732120c7b6",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "345181930ec26661",
    },
    grouped={
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "af9697a82392418d",
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.backward": "963d9b114916c915",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.forward": "aa88514f7bf50bf0",
    },
    fp4={
        "transformer_engine.pytorch.tensor.nvfp4_tensor:NVFP4Quantizer": "c2b722bebcce24f7",
    },
)

TE_2_12 = TE_2_11.then(  # recorded from 2.12.0
    "2.12",
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "8ea97dfa5b4c4eb7",
        "transformer_engine.pytorch.module.linear:Linear.forward": "0bec4d4324c6dece",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "1346d2ed145788b5",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "48a1614cc6997c1f",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "cb8b2da9d9189366",
        "transformer_engine.pytorch.distributed:gather_along_first_dim": "c6cb82f3b48cf1ff",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "591a0eddbef3d4d4",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "8a1371f0d5814adc",
        f"{ATTENTION}.backends:FusedAttention.forward": "bc8b71b1a081f7ca",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "c6de3114676f171d",
    },
    fp8={
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.init_fp8_metadata": "67ab4ebbb24b9567",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.get_weight_workspace": "dda7b2c4d23f3b0e",
        "transformer_engine.pytorch.module.linear:Linear._get_quantizers": "2ee6c5a89188a220",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear._get_quantizers": "4ec89bdf3df6b7d5",
        "transformer_engine.pytorch.tensor.float8_tensor:Float8CurrentScalingQuantizer": "7222a46a16cb1f2c",
    },
    grouped={
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "22460cfb2e92caca",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.forward": "7fafcf12ff04b04a",
    },
    fp4={
        "transformer_engine.pytorch.tensor.nvfp4_tensor:NVFP4Quantizer": "f73c7df2ec7d99c1",
    },
)

TE_2_13 = TE_2_12.then(  # recorded from 2.13.0
    "2.13",
    fingerprints={
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "461be596ba32ee93",
    },
    fp8={
        "transformer_engine.pytorch.tensor.float8_tensor:Float8Quantizer": "2deb50831738905b",
        "transformer_engine.pytorch.tensor.float8_tensor:Float8CurrentScalingQuantizer": "4b911c4a93c86e03",
        "transformer_engine.pytorch.tensor.storage.float8_tensor_storage:Float8TensorStorage": "d22ebd6607d17fad",
    },
    grouped={
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "e2b5b4f3249e2ae2",
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.backward": "7fce5e6d16c5b295",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.backward_dw": "0f17617dd168dc2c",
    },
    fp4={
        "transformer_engine.pytorch.tensor.nvfp4_tensor:NVFP4Quantizer": "e50495eb0850b39c",
    },
)

TE_2_14 = TE_2_13.then(  # recorded from 2.14.0
    "2.14",
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "e2bfe0dcc4d5e7cf",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "d7ce00be9c63d8e9",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "3c179e4d92d11948",
        "transformer_engine.pytorch.distributed:gather_along_first_dim": "459ef4842d10dfe0",
        "transformer_engine.pytorch.distributed:reduce_scatter_along_first_dim": "c53f0ff11f5b8521",
    },
    fp8={
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.get_weight_workspace": "2b4a80548ba209f1",
        "transformer_engine.pytorch.module.linear:Linear._get_quantizers": "c0a3f1e8e5eceffb",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear._get_quantizers": "427799692383feac",
        "transformer_engine.pytorch.tensor.float8_tensor:Float8Quantizer": "4e7a64849fedf665",
        "transformer_engine.pytorch.tensor.float8_tensor:Float8CurrentScalingQuantizer": "2a6112d1b62703c5",
        "transformer_engine.pytorch.tensor.storage.float8_tensor_storage:Float8TensorStorage": "aff0b1a06304ba2f",
        "transformer_engine.pytorch.distributed:_all_gather_fp8": "9e754e73ced0815f",
    },
    grouped={
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "dba9438cb8fb45d7",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.forward": "b48b15700c442881",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.backward_dw": "3785524662351964",
    },
    fp4={
        "transformer_engine.pytorch.tensor.nvfp4_tensor:NVFP4Quantizer": "9105d1723bb25fc0",
        "transformer_engine.pytorch.distributed:_all_gather_nvfp4": "dc5a59d890b2bca8",
    },
)

TE_2_15 = TE_2_14.then(  # recorded from 2.15.0
    "2.15",
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "6d50c4f415f316d1",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "ab553c203664f3a4",
        "transformer_engine.pytorch.module.linear:Linear.forward": "e9e68d5f6e0f75f5",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "997758585c05382b",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "76ea6eecdd783d4b",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "08d6d647e4369459",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "e53743753104e11a",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "4ecbe04ba85b63e5",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "76bc527deecde631",
        f"{ATTENTION}.backends:FlashAttention.forward": "169a65d48775192c",
        f"{ATTENTION}.backends:FusedAttention.forward": "316d63adfbffb391",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "16231dfe247a22e9",
        "transformer_engine.pytorch.module.linear:_linear_forward_impl": "d316c58bde0696ca",
        "transformer_engine.pytorch.module.linear:_linear_setup_ctx": "160e5893a42c7884",
        "transformer_engine.pytorch.module.linear:_linear_backward": "b3d292fb673be1f9",
    },
    fp8={
        "transformer_engine.pytorch.quantization:FP8GlobalStateManager.get_autocast_state": "879a0109b995eeee",
        "transformer_engine.pytorch.quantization:FP8GlobalStateManager.set_autocast_state": "117221d58362f8c7",
        "transformer_engine.pytorch.quantization:FP8GlobalStateManager.is_first_fp8_module": "9fc59ea90be08d38",
        "transformer_engine.pytorch.quantization:FP8GlobalStateManager.add_fp8_tensors_to_global_buffer": "0d4b6c20f390ed3d",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.get_weight_workspace": GONE,
        "transformer_engine.pytorch.module.linear:Linear._get_quantizers": "d2da9008fffe4d8b",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear._get_quantizers": "dc6030f9d69e76d3",
        "transformer_engine.pytorch.module.base:quantize_weight": "1d71a50e2eb53ffb",
    },
    grouped={
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "f51cc6af0fcb4e41",
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.backward": "70c49449bc293935",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.forward": "4250051eea99ee17",
    },
    fp4={
        "transformer_engine.common.recipe:NVFP4BlockScaling": "56a7aa58c48025c3",
    },
)

TE_2_16 = TE_2_15.then(  # recorded from 2.16.0
    "2.16",
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "6f8abc712597506c",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "047667a9adc7d8fb",
        "transformer_engine.pytorch.module.linear:Linear.forward": "e3ced08e8f2ab807",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "b485b81212a7ee49",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "7c7281ed1d06982d",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "e174966eafa1b087",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "ea4e68afff0922d2",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "e58487319321ccc5",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "00635e59ca999b5a",
        f"{ATTENTION}.backends:FlashAttention.forward": "06ed716f8722a931",
        f"{ATTENTION}.backends:FusedAttention.forward": "e82de106d2eac71a",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "1acc9ed72b8a1e52",
        "transformer_engine.pytorch.module.linear:_linear_forward_impl": "6be982b3f8eb4841",
        "transformer_engine.pytorch.module.linear:_linear_setup_ctx": "7e934f6b77d5ecb5",
        "transformer_engine.pytorch.module.linear:_linear_backward": "3b24915f1b046a1a",
    },
    fp8={
        "transformer_engine.pytorch.quantization:FP8GlobalStateManager.add_fp8_tensors_to_global_buffer": "884a2ae8724edad4",
        "transformer_engine.pytorch.quantization:DelayedScalingRecipeState": "36736812aecd7c42",
        "transformer_engine.pytorch.module.linear:Linear._get_quantizers": "5da5dff6ca8ded5b",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear._get_quantizers": "bc7546ae5d8325ae",
        "transformer_engine.pytorch.tensor.float8_tensor:Float8Quantizer": "bbdf9572be7a9891",
        "transformer_engine.pytorch.tensor.float8_tensor:Float8CurrentScalingQuantizer": "9fc6fa60ec85394b",
        "transformer_engine.pytorch.tensor.storage.float8_tensor_storage:Float8TensorStorage": "ea70dd5e2ebb2d03",
    },
    grouped={
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "1343f055d0a6e445",
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.backward": "5b50b4e692449c62",
    },
    fp4={
        "transformer_engine.common.recipe:NVFP4BlockScaling": "65b819720b0ddce2",
        "transformer_engine.pytorch.quantization:NVFP4BlockScalingRecipeState": "e49ba21ab98bae64",
        "transformer_engine.pytorch.tensor.nvfp4_tensor:NVFP4Quantizer": "0b7e5c9a02717569",
    },
)

TE_2_17 = TE_2_16.then(  # recorded from 2.17.0
    "2.17",
    fingerprints={
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "0300ee12ec3c4cac",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "d4eb4562b57a2483",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "61af3d1952dce90f",
        f"{ATTENTION}.backends:FusedAttention.forward": "cc2ba162ca4b01ea",
        "transformer_engine.pytorch.module.linear:_linear_forward_impl": "c9a2a2e36625d0e6",
        "transformer_engine.pytorch.module.linear:_linear_backward": "a101cc33078f3910",
    },
    fp8={
        "transformer_engine.pytorch.quantization:DelayedScalingRecipeState": "720837b16a061994",
        "transformer_engine.pytorch.tensor.float8_tensor:Float8Quantizer": "3b0b5ffcceba4323",
        "transformer_engine.pytorch.tensor.float8_tensor:Float8CurrentScalingQuantizer": "39e86f5ef56e7ace",
        "transformer_engine.pytorch.tensor.storage.float8_tensor_storage:Float8TensorStorage": "5e38054527a540ab",
    },
    grouped={
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "c475b6c794f1f1c5",
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.backward": "4ce0696ecb0ca42d",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.forward": "e2408d63af3539e5",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.backward_dw": "cc48f8eb2be73749",
    },
    fp4={
        "transformer_engine.common.recipe:NVFP4BlockScaling": "e1cbf5aa25b0eaf8",
        "transformer_engine.pytorch.quantization:NVFP4BlockScalingRecipeState": "1769c2cd9ebec8f6",
        "transformer_engine.pytorch.tensor.nvfp4_tensor:NVFP4Quantizer": "e4562cc66aab349c",
    },
)

TE_2_18 = TE_2_17.then(  # recorded from 2.18.0
    "2.18",
    fingerprints={
        "transformer_engine.pytorch.module.linear:Linear.forward": "5bfc624e1061c731",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "66d2cf5e6a52afe2",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "dbcc3bb7bcf91ee3",
        "transformer_engine.pytorch.module.layernorm_linear:LayerNormLinear.forward": "a533c99f35825e1c",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "c66d4c2eb99e353e",
        f"{ATTENTION}.backends:FlashAttention.forward": "d9e985d2ca819549",
        "transformer_engine.pytorch.module.linear:_linear_forward_impl": "77c6d204ec25f8c1",
        "transformer_engine.pytorch.module.linear:_linear_setup_ctx": "5e246ca3bfd43b87",
        "transformer_engine.pytorch.module.linear:_linear_backward": "ac97bed59350d8b0",
    },
    fp8={
        "transformer_engine.pytorch.tensor.float8_tensor:Float8CurrentScalingQuantizer": "91224e7591a7f6dd",
        "transformer_engine.pytorch.tensor.storage.float8_tensor_storage:Float8TensorStorage": "45146cbe8012d5fc",
    },
    grouped={
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "9b8300cc8a6b0cfb",
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.backward": "2b28084b4fd72d80",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.forward": "86fc284bb1057b55",
    },
    fp4={
        "transformer_engine.pytorch.tensor.nvfp4_tensor:NVFP4Quantizer": "1546c7b85db1a7e0",
    },
)

TE_2_19 = TE_2_18.then(  # recorded from 2.19.0
    "2.19",
    fingerprints={
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.forward": "f0370b1b812ac226",
        "transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.backward": "b0ad15c67f82edcd",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.grad_output_preprocess": "b91c0ef4d8350916",
        "transformer_engine.pytorch.distributed:gather_along_first_dim": "7dc99a86a131fdfe",
        "transformer_engine.pytorch.distributed:reduce_scatter_along_first_dim": "9e2a3960fb941ef3",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "33a2cb9779928cd4",
        f"{ATTENTION}.backends:UnfusedDotProductAttention.forward": "d64737b120122b3f",
        f"{ATTENTION}.backends:FlashAttention.forward": "2fc325f2cdaae06a",
        f"{ATTENTION}.backends:FusedAttention.forward": "0144740c9502b43f",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "86aeb9ccf5863185",
        "transformer_engine.pytorch.module.linear:_linear_forward_impl": "bffbdb5c9a54d1d6",
        "transformer_engine.pytorch.module.linear:_linear_setup_ctx": "8384a32bc0bb3e67",
        "transformer_engine.pytorch.module.linear:_linear_backward": "83d987c1fb0e5516",
    },
    fp8={
        "transformer_engine.pytorch.tensor.float8_tensor:Float8CurrentScalingQuantizer": "be0d63cd34d18a10",
        "transformer_engine.pytorch.tensor.storage.float8_tensor_storage:Float8TensorStorage": "3801a2e1a7df1410",
    },
    grouped={
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "a137bd6047d8875f",
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.backward": "bcbd1864278c8e65",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.forward": "f86a974138dffad1",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.backward_dw": "ccba0cb94e9d9b15",
    },
    fp4={
        "transformer_engine.pytorch.tensor.nvfp4_tensor:NVFP4Quantizer": "578967bc53471e87",
        "transformer_engine.pytorch.distributed:_all_gather_nvfp4": "a7cb445fb4044c7d",
    },
)

TE_2_20 = TE_2_19.then(  # recorded from 2.20.2
    "2.20",
    fingerprints={
        "transformer_engine.pytorch.module.linear:_Linear.forward": "45cdb395e69fa46e",
        "transformer_engine.pytorch.module.linear:_Linear.backward": "b4d7b743326cbd8f",
        "transformer_engine.pytorch.module.linear:Linear.forward": "3945f8819ce985e4",
        "transformer_engine.pytorch.module.base:TransformerEngineBaseModule.prepare_forward": "b2b50c2e45b510af",
        f"{ATTENTION}.dot_product_attention:DotProductAttention.forward": "a55b4c2e8c8eb64b",
        f"{ATTENTION}.backends:FlashAttention.forward": "a71dcc03e527c478",
        f"{ATTENTION}.backends:FusedAttention.forward": "ab53a31231e908c6",
        f"{ATTENTION}.backends:FusedAttnFunc.forward": "6468e60a916c6554",
        "transformer_engine.pytorch.module.linear:_linear_forward_impl": "245cc90ce0157526",
        "transformer_engine.pytorch.module.linear:_linear_setup_ctx": "5588fae7f2939b3a",
        "transformer_engine.pytorch.module.linear:_linear_backward": GONE,
    },
    fp8={
        "transformer_engine.pytorch.tensor.storage.float8_tensor_storage:Float8TensorStorage": "0b82fb81fd37c186",
    },
    grouped={
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.forward": "06cc48e78984f117",
        "transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.backward": "6161afec230da015",
        "transformer_engine.pytorch.module.grouped_linear:GroupedLinear.forward": "d863befe8001525e",
    },
)

RELEASES = (TE_2_9, TE_2_10, TE_2_11, TE_2_12, TE_2_13, TE_2_14, TE_2_15, TE_2_16, TE_2_17, TE_2_18, TE_2_19, TE_2_20)
KNOWN: dict[str, TeRelease] = {release.version: release for release in RELEASES}
