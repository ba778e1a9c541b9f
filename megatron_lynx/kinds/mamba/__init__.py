"""Mamba-2 layers and gated delta nets."""
