"""Opaque halves."""
