"""Installs plans in a live run: hooks on Megatron, and the checks before."""
