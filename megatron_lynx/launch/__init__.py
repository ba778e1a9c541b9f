"""Runs an unmodified training script of Megatron-LM under a plan.

    torchrun ... -m megatron_lynx.launch pretrain_gpt.py --lynx-plan plan.yaml <Megatron arguments>

script                   reads our flags, and runs the script
hosts                    hooks on Megatron-LM or Megatron-Bridge: flags, initialisation, the training loop, a step
launch                   reads, checks, installs and removes the plan
schedule                 the training loop without flushes
check, frames            --lynx-check: bits of a step compared with stock's, or of backward's tensors with the saved ones
training_state           saves and restores the state that a pass changes, so that a step can run again
reporter                 predicted and measured seconds and peaks of each stage
metrics                  figures in TensorBoard and W&B
out_of_memory            explains an out-of-memory error
ending, message          one message when a run fails
"""
