"""Which frames a check of frames looks at: a few in each step, drawn from a seed, so that what it keeps is bounded.

    step 1     the first frame of each kind, until so many were taken: how many there will be, nobody knows yet
    step 2...  kinds that were drawn least come first; of a kind, any of as many frames as there were of it in the step before

A frame's kind is how the plan treats it: its half, what is replayed, in which window, what goes to the host.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable

PER_STEP = 4
"""Frames of one rank and step. Of one, the host keeps what one half of a layer saves for one micro-batch."""


class Draw:
    """The draws of one rank."""

    def __init__(self, seed: int, per_step: int = PER_STEP) -> None:
        self._random = random.Random(seed)  # its own: training's numbers are not touched
        self._per_step = per_step
        self._left = 0
        self._seen = Counter[Hashable]()
        self._chosen: set[tuple[Hashable, int]] = set()
        self._drawn = Counter[Hashable]()

    @property
    def kinds(self) -> tuple[int, int]:
        """How many kinds of frames were drawn, of how many that there were."""
        return sum(count > 0 for count in self._drawn.values()), len(self._drawn)

    def step_begins(self) -> None:
        before, self._seen = self._seen, Counter()
        self._left = self._per_step
        self._chosen.clear()
        planned, left = Counter(self._drawn), Counter(before)
        for _ in range(self._per_step):
            open_kinds = sorted((kind for kind in before if left[kind]), key=str)
            if not open_kinds:
                return
            kind = min(open_kinds, key=lambda kind: (planned[kind], self._random.random()))
            free = [number for number in range(before[kind]) if (kind, number) not in self._chosen]
            self._chosen.add((kind, self._random.choice(free)))
            planned[kind] += 1
            left[kind] -= 1

    def takes(self, kind: Hashable) -> bool:
        """Whether this frame, the next one of its kind in this step, is drawn."""
        number = self._seen[kind]
        self._seen[kind] += 1
        self._drawn.setdefault(kind, 0)
        drawn = self._left > 0 and ((kind, number) in self._chosen or not self._drawn[kind])
        self._drawn[kind] += drawn
        self._left -= drawn
        return drawn
