"""Trains small jobs with the real megatron-core on this machine, with or without a GPU: for tests, profiles, comparisons."""
