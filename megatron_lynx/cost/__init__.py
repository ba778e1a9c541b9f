"""Prices a job, a stage, a layer and a recomputation in seconds, bytes and FLOPs, from a profile; each formula once."""
