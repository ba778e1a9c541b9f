"""Prices a job, a stage, a layer and a replay in seconds, bytes and FLOPs, from a profile; each formula is in one place."""
