"""Checks whether every recomputation of a stage has its window in time and within the ahead depth.

    before   [forward of a later micro-batch: fwd.* windows]  [pipe.recv_backward]        (steady: both; cool-down: the receive)
             (with chunks it may be another chunk's: then layers count by their index in the chunk)
    then     mlp(L)  attention(L)  mlp(L-1)  attention(L-1) ...                           each with its bwd.* windows in order

A frame is *ahead* from the first stretch of its recomputation until backward enters its half. Each stretch needs a window after
that of the previous stretch. With sequence parallelism the first window of a half's own backward gathers its gradient, before
most saved tensors are needed: it may hide the half's own recomputation (`anatomy.in_time`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_lynx.anatomy.address import BACKWARD_PHASES, ON_DEMAND, BackwardPhase, FrameKey, Window, WindowAddress
from megatron_lynx.anatomy.in_time import own_exchanges_in_time, own_windows_in_time
from megatron_lynx.plan.stage import Stage
from megatron_lynx.timetable import PlannedHalf, Timetable


def problems(stage: Stage, timetable: Timetable, chunk: int, *, te: bool = False) -> Iterator[str]:
    """Every window of an entry that the runtime cannot follow.

    `chunk`: the entry's index in the timetable. `te`: the layers are Transformer Engine's.
    """
    for phase in BACKWARD_PHASES:
        places, entered = _places(timetable, chunk, phase)
        for half in reversed(timetable.chunks[chunk]):
            in_time = entered[half.key] - 1 + _own_in_time(half, timetable, te)
            yield from _misplaced(stage, half, phase, places, in_time)
    for phase in BACKWARD_PHASES:
        deepest, where = _deepest(timetable, chunk, phase)
        if deepest > stage.ahead_depth:
            yield f"ahead_depth is {stage.ahead_depth}, but {deepest} frames are regenerated ahead in {phase} at {where}"


def depth(timetable: Timetable, chunk: int = 0) -> int:
    """The most frames that a chunk's windows recompute ahead at once."""
    return max(_deepest(timetable, chunk, phase)[0] for phase in BACKWARD_PHASES)


Places = Mapping[Window, int]
"""Windows that can serve a backward, with their index in time."""


def _places(timetable: Timetable, chunk: int, phase: BackwardPhase) -> tuple[Places, Mapping[FrameKey, int]]:
    """The windows that can serve a backward, and for each half the number of windows before backward enters it."""
    places: dict[Window, int] = {}
    entered: dict[FrameKey, int] = {}
    for _, half, waits in timetable.serving(chunk, phase):
        if half is not None:
            entered[half] = len(places)
        for window in (wait.window for wait in waits if not wait.over):
            places[window] = len(places)
    return places, entered


def _own_in_time(half: PlannedHalf, timetable: Timetable, te: bool) -> int:
    """Number of windows of the half's backward before backward needs a recomputed tensor of the half."""
    if half.goes_on_behind is not None:
        return 1  # this includes the dropout mask that backward reads first
    if half.section.exchanges and half.layer in timetable.layout.exchanging:
        return own_exchanges_in_time(half.section, half.replay)
    if not half.section.has_windows:
        return 0
    return own_windows_in_time(half.section, half.replay, sequence_parallel=timetable.layout.sequence_parallel, te=te)


def _misplaced(stage: Stage, half: PlannedHalf, phase: BackwardPhase, windows: Places, in_time: int) -> Iterator[str]:
    """`in_time`: index of the last window that can hide this frame's recomputation."""
    (layer, name), place, before = half.key, half.place(phase), -1
    gather = place.gather
    inside = None if gather is None else WindowAddress("fwd", layer, name, 0)  # the gather of the recomputed linear's own forward
    if gather is not None and gather != ON_DEMAND and gather not in windows:
        yield f"gather.{name} of layer {layer} ({gather}) is no collective of this stage"
        return
    if gather is not None and gather == inside:
        yield f"gather.{name} of layer {layer} ({gather}) lies in the very linear whose input it gathers"
        return
    as_named = stage.rule_for(layer).windows.stretches(name, phase)
    for (window, _), stretch in zip(place.stretches, as_named, strict=True):
        if window == ON_DEMAND:
            return
        where = f"windows.{name} of layer {layer} ({stretch}, {phase})"
        if window not in windows:
            yield f"{where} is no window of this stage in this phase"
        elif windows[window] > in_time:
            yield f"{where} comes after backward needs the half"
        elif window == inside:
            yield f"{where} lies in the very linear that is replayed"
        elif windows[window] <= before:
            yield f"{where} does not come after the window of the stretch before it"
        elif gather == ON_DEMAND:
            yield f"{where} cannot hide a replay whose input is gathered on demand (a replay in a window must not communicate)"
        elif gather is not None and windows[gather] >= windows[window]:
            yield f"{where} comes before the half's input is gathered ({gather})"
        else:
            before = windows[window]
            continue
        return


def _deepest(timetable: Timetable, chunk: int, phase: BackwardPhase) -> tuple[int, str]:
    """The most frames that are ahead at once, and the window at which they are."""
    ahead: set[FrameKey] = set()
    deepest, where = 0, ""
    for through, entered, waits in timetable.serving(chunk, phase):
        ahead -= {entered}
        for wait in waits:
            recomputed = (task for task in through.at("in", wait.window) if task.do == "recompute")
            ahead.update(task.half for task in recomputed if task.since is None and task.half != entered)
            if len(ahead) > deepest:
                deepest, where = len(ahead), str(wait.window)
    return deepest, where
