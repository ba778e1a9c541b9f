"""Which part of a replay runs in which window, and how a plan file says it.

    text                                                   means
    bwd.mlp.0                                              all of it in that window
    bwd.mlp.0 until rotary then bwd.mlp.2                  what comes before the code `rotary` in the first one, the rest behind
    fwd.attention.1 until linear_qkv then on_demand        the norm in a forward, the rest when backward asks for it

A replay stops between two items before which only sites lie (`Section.stops`), so that nothing runs twice. What a window was too
short for runs on in it, and what was missed runs in the next window, or on demand: slow, never wrong.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megatron_lynx.anatomy.address import ON_DEMAND, PATTERN

UNTIL, THEN = " until ", " then "

PLACE_PATTERN = rf"((?!{ON_DEMAND}){PATTERN}{UNTIL}[a-z_0-9]+{THEN})*{PATTERN}"
"""What a plan file says of one half in one phase (a regular expression, also used by the plan's JSON schema)."""


class Stretch(NamedTuple):
    """The part of a replay that runs in one window: what is left of it there, or of that only what comes before an item."""

    window: str
    until: str | None = None

    def __str__(self) -> str:
        return self.window if self.until is None else f"{self.window}{UNTIL}{self.until}"


@lru_cache(maxsize=1024)
def stretches_in(text: str) -> tuple[Stretch, ...]:
    """The stretches that a text names, in order. The last one has no end."""
    parts = (part.partition(UNTIL) for part in text.split(THEN))
    return tuple(Stretch(window, until or None) for window, _, until in parts)


def in_words(stretches: tuple[Stretch, ...]) -> str:
    """What a plan file says of them."""
    return THEN.join(map(str, stretches)) or ON_DEMAND
