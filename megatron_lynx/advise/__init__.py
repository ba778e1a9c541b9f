"""Says on one screen what a launch takes today, what a plan would change, and what the memory that is left would buy.

today.py        the launch as it is written, priced; a row: one way to run it, in seconds and bytes
answer.py       all of it: today, the plan at the device's budget and at today's bytes, neighbours; where no plan fits: what would
neighbours.py   layouts one step away: micro-batch, tensor, context, pipeline, chunks, experts' groups
flags.py        which flags of the launch such a layout changes
verdict.py      one sentence;  screen.py: the screen, and the same for programs
"""

from megatron_lynx.advise.answer import Answer, answered
from megatron_lynx.advise.screen import as_json, screen
from megatron_lynx.advise.verdict import verdict

__all__ = ["Answer", "answered", "as_json", "screen", "verdict"]
