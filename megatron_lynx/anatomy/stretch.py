"""Parts of a recomputation in different windows, and their text in a plan file.

    text                                                   means
    bwd.mlp.0                                              all of it in that window
    bwd.mlp.0 until rotary then bwd.mlp.2                  the part before the code `rotary` in the first one, then the rest
    fwd.attention.1 until linear_qkv then on_demand        the norm in a forward, the rest when backward needs it

A recomputation stops between two items after sites only (`Section.stops`), so that no code runs twice. A part that is longer than
its window is finished in it, and a missed part runs in the next window, or on demand: slow, never wrong.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megatron_lynx.anatomy.address import ON_DEMAND, PATTERN

UNTIL, THEN = " until ", " then "

PLACE_PATTERN = rf"((?!{ON_DEMAND}){PATTERN}{UNTIL}[a-z_0-9]+{THEN})*{PATTERN}"
"""Regular expression of one half's text in one phase (also used by the plan's JSON schema)."""


class Stretch(NamedTuple):
    """The part of a recomputation in one window: all the rest, or up to an item."""

    window: str
    until: str | None = None

    def __str__(self) -> str:
        return self.window if self.until is None else f"{self.window}{UNTIL}{self.until}"


@lru_cache(maxsize=1024)
def stretches_in(text: str) -> tuple[Stretch, ...]:
    """The stretches of a text, in order. The last one has no end."""
    parts = (part.partition(UNTIL) for part in text.split(THEN))
    return tuple(Stretch(window, until or None) for window, _, until in parts)


def in_words(stretches: tuple[Stretch, ...]) -> str:
    """The text of stretches in a plan file."""
    return THEN.join(map(str, stretches)) or ON_DEMAND
