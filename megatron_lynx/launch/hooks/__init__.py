"""What a launch holds on to in `megatron.training`, one file each."""
