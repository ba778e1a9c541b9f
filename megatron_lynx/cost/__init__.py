"""Seconds, bytes and FLOPs of jobs, stages, layers and recomputation, from a profile."""
