"""Compares a launch with stock's best setting and the best plan, in its layout and in layouts one step away.

today.py        the launch as written, priced; rows of seconds and bytes
answer.py       today, stock's best, plans within the device's budget and today's bytes; if none fits, changes after which one
does
neighbours.py   layouts one step away: micro-batch, tensor, context, pipeline, chunks, experts' groups
flags.py        launch flags that a layout, a setting or a plan changes
verdict.py      the recommendation
screen.py       the screen, and the same as JSON
"""

from megatron_lynx.advise.answer import Answer, answered
from megatron_lynx.advise.screen import as_json, screen
from megatron_lynx.advise.verdict import verdict

__all__ = ["Answer", "answered", "as_json", "screen", "verdict"]
