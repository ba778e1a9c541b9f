"""Runs an unmodified training script of Megatron-LM under a plan.

torchrun ... -m megatron_lynx.launch pretrain_gpt.py --lynx-plan plan.yaml <Megatron arguments>

command    our flags and the script, read before anything heavy is imported
script     runs the script as `python SCRIPT` would, with the hooks of its host in place (`hosts`); of Megatron-LM:
  hooks/arguments       Megatron's parser knows our flags: --help, logged, recorded with its arguments
  hooks/initialisation  once all ranks can talk: what the flags say is read and checked, and all ranks agree on it
  hooks/loop            around Megatron's training loop: install(model, plan), and remove
ending     which rank ended badly, how far it was, and why
message    prints a line with one write
agreement  one rank's mistake stops all of them, with one message
check      runs the first steps once more as stock, and compares bit for bit
trace_file one step's timeline of all ranks, in one file
"""
