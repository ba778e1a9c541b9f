"""Writes containers of Megatron-Bridge's own recipes to a folder, with the model's configuration in place of a hub's answer."""

import sys
from pathlib import Path

from megatron.bridge import AutoBridge
from megatron.bridge.recipes.nemotronh import nemotron_3_nano_pretrain_config, nemotronh_8b_pretrain_config
from megatron.bridge.recipes.qwen import qwen3_moe
from transformers import Qwen3MoeConfig

OF_30B = Qwen3MoeConfig(
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    vocab_size=151936,
    tie_word_embeddings=False,
    architectures=["Qwen3MoeForCausalLM"],
)
RECIPES = {
    "qwen3_30b": qwen3_moe.qwen3_30b_a3b_sft_config,
    "qwen3_30b_lora": qwen3_moe.qwen3_30b_a3b_peft_config,
    "nemotron_h_8b": nemotronh_8b_pretrain_config,
    "nemotron_3_nano": nemotron_3_nano_pretrain_config,
}

if __name__ == "__main__":
    AutoBridge.from_hf_pretrained = staticmethod(lambda path, **others: AutoBridge.from_hf_config(OF_30B))
    for name, recipe in RECIPES.items():
        recipe().to_yaml(str(Path(sys.argv[1]) / f"{name}.yaml"))
