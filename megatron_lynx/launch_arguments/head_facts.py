"""What of a launch makes something else of logits than a loss: a head in pieces has none to give."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.errors import Problem
from megatron_lynx.launch_arguments.given import Given

WANTS_LOGITS = {"use_mup": "it scales logits", "config_logger_dir": "it writes logits to files"}


def refused_in_pieces(given: Given) -> Iterator[Problem]:
    """Every flag that a plan for a head in pieces cannot be made with."""
    for name, why in WANTS_LOGITS.items():
        value = given.values.get(name)
        if value is not None and value.value:
            todo = f"drop it ({why}), or plan without a head in pieces"
            yield Problem(value.said, str(value.value), "a launch without it, with a head in pieces", todo)
