"""Halves that nobody looks into: they are kept whole and priced."""
