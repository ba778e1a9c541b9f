"""All that is written outside of a new kind's folder: three lines, here for as long as a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_lynx.kinds import planning, sections

from .planning import GatedAttention
from .section import GATE, GATED, chosen


@contextmanager
def registered() -> Iterator[None]:
    from megatron_lynx.apply.kinds import KINDS_IN
    from megatron_lynx.apply.live_run import module_at

    sections.KINDS.append(sections.Kind((GATED,), chosen, GATED.name))
    planning.FACES[GATED.name] = GatedAttention
    KINDS_IN[GATED.name] = lambda layer: module_at(layer, GATE.path) is not None
    try:
        yield
    finally:
        sections.KINDS.pop()
        del planning.FACES[GATED.name]
        del KINDS_IN[GATED.name]
