"""Runs an unmodified training script of Megatron-LM under a plan.

torchrun ... -m megatron_lynx.launch pretrain_gpt.py --lynx-plan plan.yaml <Megatron arguments>
"""
