"""Runs an unmodified training script of Megatron-LM under a plan.

    torchrun ... -m megatron_lynx.launch pretrain_gpt.py --lynx-plan plan.yaml <Megatron arguments>

script         reads our flags, and runs the script
hosts          hooks on Megatron-LM or Megatron-Bridge: flags, initialisation, the training loop, a step
launch         reads, checks, installs and removes the plan
schedule       the training loop without flushes
check          --lynx-check
outcome        predicted and measured figures
out_of_memory  explains an out-of-memory error
ending         one message when a run fails
"""
