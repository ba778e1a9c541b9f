"""Decides for each layer of a pipeline stage which tensors stay, which are recomputed, and in which windows, within a budget."""
