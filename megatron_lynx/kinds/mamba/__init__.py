"""Mamba-2 layers."""
