"""Trains Megatron models without pipeline flushes (PipeDream-2BW), with two versions of the weights."""
