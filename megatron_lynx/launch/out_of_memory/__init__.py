"""Explains an out-of-memory error of the device: where and when it happened, what was planned, what is allocated, and what would
fit.

watch        turns such an error of a script or a step into ours
moment       finds the moment of the step, from the engine's notes and the traceback
explanation  writes the message, with the nearest change that fits as a command
"""
