"""The few figures at the top of a page: predicted beside measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megatron_lynx.measure.run_outcome import RunOutcome
from megatron_lynx.report.figures import Seen
from megatron_lynx.report.island import Point, Tile, Unit
from megatron_lynx.report.outcome import passes_s

FIGURES: tuple[tuple[str, Unit, str, Callable[[Seen], float | None]], ...] = (
    ("step", "s", "forwards and backwards; reducing gradients and the update come on top", lambda seen: seen.step_s),
    ("replays hidden", "share", "of all seconds of replays, those behind waits", lambda seen: seen.hidden_share),
    ("replays exposed", "s", "in one step, on the stage that has most", lambda seen: seen.exposed_s),
    ("collectives unused", "share", "of all seconds of waits for tensor-parallel collectives", lambda seen: seen.unused_share),
)


def tiles_of(views: Sequence[Seen], points: Sequence[Point], outcome: RunOutcome | None = None) -> Iterator[Tile]:
    """Those of which there is a figure."""
    predicted = next((seen for seen in views if seen.name == "predicted"), None)
    measured = next((seen for seen in views if seen.name == "measured"), None)
    shown = next((point for point in points if point["shown"]), None)
    for label, unit, note, figure in FIGURES:
        values = [None if seen is None else figure(seen) for seen in (predicted, measured)]
        if label == "step" and values[0] is None and shown is not None:
            values[0] = shown["step_s"] or None
        if label == "step" and values[1] is None and outcome is not None:
            values[1] = passes_s(outcome)
        if values != [None, None]:
            yield Tile(label=label, unit=unit, predicted=values[0], measured=values[1], note=note)
    if shown is not None and shown["memory_bytes"]:
        measured_bytes = max([stage["measured_bytes"] or 0 for stage in shown["stages"]], default=0) or None
        note = "everything on the device that holds most, at its peak"
        yield Tile(label="fullest device", unit="bytes", predicted=shown["memory_bytes"], measured=measured_bytes, note=note)
