"""How the spans of a timeline are drawn: each kind has its lane, its colour, and its place above or below other bars.

    span        waiting in a window           compute lane: a hole (grey)    communication lane: the window (its colour)
                everything else               one bar, in its lane

A half's bar spans the waits inside it. Their holes take them out of the compute lane again, and the replays that ran there are
drawn over the holes, and so are weight gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_lynx.simulator.timeline import Span


@dataclass(frozen=True)
class Style:
    """How one kind of bar looks; `order` says what lies over what."""

    label: str
    face: str
    order: int


FORWARD = Style("forward half", "#bcd7f0", 2)
BACKWARD = Style("backward half", "#7fabd3", 2)
HIDDEN = Style("replay in a window", "#2e9e5b", 4)
ON_DEMAND = Style("replay on demand (exposed)", "#d6301d", 4)
FILLING = Style("weight gradient in a window", "#17818c", 4)
FLUSHED = Style("deferred weight gradient, exposed", "#a8551f", 4)
WAITING = Style("waiting", "#e3e3e3", 3)
WINDOW = Style("window: tensor-parallel communication", "#a98bc9", 2)
RECEIVE = Style("window: pipeline receive", "#e6a94e", 2)
GATHER = Style("gathered input", "#5c3d8a", 3)
OFFLOAD = Style("copy to the host", "#8c8c46", 3)
RELOAD = Style("copy back from the host", "#c9c25b", 3)
UPDATE = Style("update, with the wait for the other stages", "#4a4a4a", 3)
STYLES = (FORWARD, BACKWARD, HIDDEN, ON_DEMAND, FILLING, FLUSHED, WAITING, WINDOW, RECEIVE, GATHER, OFFLOAD, RELOAD, UPDATE)


@dataclass(frozen=True)
class Bar:
    """A span as it is drawn: its lane and its style."""

    lane: str
    style: Style
    span: Span


def bars_of(spans: Iterable[Span]) -> list[Bar]:
    """The bars of one rank. A wait has two: the window in the communication lane, its hole in the compute lane."""
    return [bar for span in spans for bar in _bars(span)]


COMPUTE = {"forward": FORWARD, "backward": BACKWARD, "update": UPDATE, "copy_wait": WAITING}
COPIES = {"gather": GATHER, "offload": OFFLOAD, "reload": RELOAD}


def _bars(span: Span) -> tuple[Bar, ...]:
    if span.kind in COMPUTE:
        return (Bar("compute", COMPUTE[span.kind], span),)
    if span.kind == "replay":
        return (Bar("compute", ON_DEMAND if span.on_demand else HIDDEN, span),)
    if span.kind == "weight_gradient":
        return (Bar("compute", FLUSHED if span.flushed else FILLING, span),)
    if span.kind in COPIES:
        return (Bar("communication", COPIES[span.kind], span),)
    receive = span.kind == "recv" or (span.window or "").startswith("pipe.")
    return (Bar("compute", WAITING, span), Bar("communication", RECEIVE if receive else WINDOW, span))
