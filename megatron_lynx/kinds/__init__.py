"""Kinds of layer halves: their sections as data, and their sizes, seconds and saved tensors for planning."""
