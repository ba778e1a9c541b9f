"""Sparse attention over compressed keys and values."""
