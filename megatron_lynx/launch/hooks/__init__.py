"""Hooks on `megatron.training` through which a launch adds its flags, installs the plan and follows each step: one file each."""
