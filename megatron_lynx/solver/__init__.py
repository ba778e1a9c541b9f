"""Decides what each layer of a pipeline stage keeps, what it replays and in which windows, within a memory budget."""
