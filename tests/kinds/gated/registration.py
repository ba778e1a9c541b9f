"""All that is written outside of a new kind's folder: three lines, here for as long as a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lynx.kinds import planning, sections

from .planning import GatedAttention
from .section import GATED, chosen


@contextmanager
def registered() -> Iterator[None]:
    from megatron_lynx.apply.kinds import FACES

    from .running import HeldGatedAttention

    sections.KINDS.append(sections.Kind((GATED,), chosen, GATED.name))
    planning.FACES[GATED.name] = GatedAttention
    FACES.append(HeldGatedAttention())
    try:
        yield
    finally:
        sections.KINDS.pop()
        del planning.FACES[GATED.name]
        FACES.pop()
