"""Running PipeDream-2BW on Megatron: one interpreter of orders, two versions of the weights."""
