"""Simulates one training step of a pipeline without running it: when each pass, replay and copy runs, what memory it holds."""
