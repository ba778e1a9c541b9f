"""Simulates one training step of a pipeline: start and end of each pass, recomputation and copy, and each stage's memory."""
