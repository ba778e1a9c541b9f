"""Compares a launch with stock's best setting and the best plan, in its layout and in layouts one step away."""

from megatron_lynx.advise.answer import Answer, answered
from megatron_lynx.advise.screen import as_json, screen, verdict

__all__ = ["Answer", "answered", "as_json", "screen", "verdict"]
