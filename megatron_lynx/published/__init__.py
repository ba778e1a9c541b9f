"""Recomputes what papers measured or printed: the planner is believed as far as it reproduces their figures."""
