"""Trains small jobs with megatron-core on this machine, with or without a GPU, for tests, profiles and comparisons."""
