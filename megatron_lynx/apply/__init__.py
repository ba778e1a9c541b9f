"""Holding on to Megatron: what a plan means for a live run, and the hooks that carry it out."""

from megatron_lynx.apply.install import Installation, install

__all__ = ["Installation", "install"]
