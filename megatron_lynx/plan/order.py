"""Walking one backward of a stage: does every replay find its window, in time and within the ahead depth?

    before   [forward of a later micro-batch: fwd.* windows]  [pipe.recv_backward]        (steady: both; cool-down: the receive)
             (with chunks it may pass another one: then its layers count by their place in the chunk)
    then     mlp(L)  attention(L)  mlp(L-1)  attention(L-1) ...                           each with its bwd.* windows in order

A frame is *ahead* from its replay until backward enters its half. With sequence parallelism the first window of a half's own
backward gathers its gradient, before any GEMM's saved tensor is needed: it may hide the half's own replay, unless that has to
regenerate the dropout mask, which backward needs first of all. Transformer Engine reads what it saved before it gathers the
gradient: there that window comes too late.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megatron_lynx.items import COLUMN_PARALLEL, Half
from megatron_lynx.plan.facts import ParallelFacts
from megatron_lynx.plan.stage import Stage
from megatron_lynx.schedule.windows import ON_DEMAND, Collective, Window, collectives_of, window_at

Phase = Literal["steady", "cooldown"]
PHASES: tuple[Phase, Phase] = ("steady", "cooldown")
FrameKey = tuple[int, Half]


def frames_of(stage: Stage) -> Iterator[FrameKey]:
    """The halves of a stage in the order in which backward reaches them."""
    for layer in reversed(list(stage.layers)):
        yield layer, "mlp"
        yield layer, "attention"


def windows_in_order(stage: Stage, sequence_parallel: bool, phase: Phase) -> list[Window]:
    """Every window from which a backward of this stage can be served, in the order in which they come."""
    order: list[Window] = []
    if phase == "steady":
        halves: tuple[Half, Half] = ("attention", "mlp")
        places = ((layer, half) for layer in stage.layers for half in halves)
        order += [
            Collective("fwd", layer, half, n) for layer, half in places for n in range(collectives_of("fwd", sequence_parallel))
        ]
    order.append("pipe.recv_backward")
    for layer, half in frames_of(stage):
        served = 1 if sequence_parallel and _replays_gemm(stage, (layer, half)) else None  # gathered once, before: no wait
        ordinals = (n for n in range(collectives_of("bwd", sequence_parallel)) if n != served)
        order += [Collective("bwd", layer, half, n) for n in ordinals]
    return order


def window_of(stage: Stage, frame: FrameKey, phase: Phase) -> Window:
    """Where a plan replays a frame."""
    layer, half = frame
    return window_at(stage.rule_for(layer).windows.of(half, phase), layer)


def gather_of(stage: Stage, frame: FrameKey) -> Window | None:
    """Behind which window a plan gathers a frame's input; None where it gathers nothing."""
    layer, half = frame
    name = stage.rule_for(layer).gather.of(half)
    return None if name is None else window_at(name, layer)


def problems(stage: Stage, layout: ParallelFacts, *, engine: bool = False) -> Iterator[str]:
    """Everything that keeps the runtime from following this stage's windows, in words.

    `engine`: the layers are Transformer Engine's.
    """
    for phase in PHASES:
        windows = windows_in_order(stage, layout.sequence_parallel, phase)
        for frame in frames_of(stage):
            in_time = _last_in_time(stage, frame, layout, windows, engine)
            yield from _misplaced(stage, frame, phase, windows, in_time)
    for phase in PHASES:
        deepest, where = _deepest(stage, layout.sequence_parallel, phase)
        if deepest > stage.ahead_depth:
            yield f"ahead_depth is {stage.ahead_depth}, but {deepest} frames are regenerated ahead in {phase} at {where}"


def depth(stage: Stage, sequence_parallel: bool) -> int:
    """How many frames its windows regenerate ahead at once."""
    return max(_deepest(stage, sequence_parallel, phase)[0] for phase in PHASES)


def _misplaced(stage: Stage, frame: FrameKey, phase: Phase, windows: list[Window], in_time: int) -> Iterator[str]:
    """`in_time`: the index of the last window that can hide this frame's replay."""
    layer, half = frame
    name = f"windows.{half} of layer {layer} ({stage.rule_for(layer).windows.of(half, phase)}, {phase})"
    window, gather = window_of(stage, frame, phase), gather_of(stage, frame)
    if gather is not None and gather != ON_DEMAND and gather not in windows:
        yield f"gather.{half} of layer {layer} ({gather}) is no collective of this stage"
        return
    if window == ON_DEMAND:
        return
    if window not in windows:
        yield f"{name} is no window of this stage in this phase"
    elif windows.index(window) > in_time:
        yield f"{name} comes after backward needs the half"
    elif gather == ON_DEMAND:
        yield f"{name} cannot hide a replay whose input is gathered on demand (a replay in a window must not communicate)"
    elif gather is not None and windows.index(gather) >= windows.index(window):
        yield f"{name} comes before the half's input is gathered ({gather})"


def _replays_gemm(stage: Stage, frame: FrameKey) -> bool:
    layer, half = frame
    return COLUMN_PARALLEL[half] in stage.rule_for(layer).replay


def _last_in_time(stage: Stage, frame: FrameKey, layout: ParallelFacts, windows: list[Window], engine: bool) -> int:
    """The index of the last window before backward needs a tensor of the half."""
    layer, half = frame
    first_own = windows.index(Collective("bwd", layer, half, 0))
    masked = f"{half}_bda" in stage.rule_for(layer).replay
    return first_own if layout.sequence_parallel and not masked and not engine else first_own - 1


def _deepest(stage: Stage, sequence_parallel: bool, phase: Phase) -> tuple[int, str]:
    """The most frames that are ahead at once, and the window where it happens."""
    served: dict[Window, list[FrameKey]] = {}
    for frame in frames_of(stage):
        if stage.rule_for(frame[0]).replays(frame[1]):
            served.setdefault(window_of(stage, frame, phase), []).append(frame)
    ahead: set[FrameKey] = set()
    deepest, where = 0, ""
    for window in windows_in_order(stage, sequence_parallel, phase):
        entered = (window.layer, window.half) if isinstance(window, Collective) and window.passing == "bwd" else None
        ahead.discard(entered)
        ahead.update(frame for frame in served.get(window, []) if frame != entered)
        if len(ahead) > deepest:
            deepest, where = len(ahead), str(window)
    return deepest, where
