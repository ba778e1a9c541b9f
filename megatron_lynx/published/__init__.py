"""What others measured or printed, recomputed: the planner is believed as far as it reproduces them."""
