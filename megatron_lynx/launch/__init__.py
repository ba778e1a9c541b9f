"""The launch: a Megatron training script, unmodified, under a plan.

torchrun ... -m megatron_lynx.launch pretrain_gpt.py --lynx-plan plan.yaml <Megatron arguments>

command    our flags and the script, read before anything heavy is imported
script     the script as `python SCRIPT` would run it, between `hold` and `give_back`
  hooks/arguments       Megatron's parser knows our flags: --help, logged, recorded with its arguments
  hooks/initialisation  once all ranks can talk: what the flags say is read and checked, and all ranks agree on it
  hooks/loop            around Megatron's training loop: install(model, plan), and remove
message    one write for what is said
agreement  one rank's mistake stops all of them, with one message
check      the first steps once more as stock, compared bit for bit
trace      one step's timeline of all ranks, in one file
"""
