"""Kinds of what fills a half of a layer, a slice each: its section, what planning asks of it, what a run must know of it."""
