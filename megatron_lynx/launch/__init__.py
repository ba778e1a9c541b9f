"""Runs an unmodified training script of Megatron-LM under a plan.

torchrun ... -m megatron_lynx.launch pretrain_gpt.py --lynx-plan plan.yaml <Megatron arguments>

script     our flags and the script, read before anything heavy is imported; runs it as `python SCRIPT` would
hosts      hooks on the framework that trains: our flags, all ranks can talk, the training loop, a step
launch     what a launch does there: the plan is read, checked and agreed on, installed, and removed
schedule   the training loop without flushes
ending     one message when a run ends badly: which rank, how far it was, and why
check      runs the first steps once more as stock, and compares bit for bit
"""
