"""Says on one screen what a launch takes today, and what stock's best setting and a plan would, in its layout and one step away.

today.py        the launch as it is written, priced; a row: one way to run it, in seconds and bytes
answer.py       all of it: today, stock's best, plans at the device's budget and at today's bytes; where no plan fits: what would
neighbours.py   layouts one step away: micro-batch, tensor, context, pipeline, chunks, experts' groups
flags.py        which flags of the launch a layout, a setting or a plan changes
verdict.py      what to run;  screen.py: the screen, and the same for programs
"""

from megatron_lynx.advise.answer import Answer, answered
from megatron_lynx.advise.screen import as_json, screen
from megatron_lynx.advise.verdict import verdict

__all__ = ["Answer", "answered", "as_json", "screen", "verdict"]
