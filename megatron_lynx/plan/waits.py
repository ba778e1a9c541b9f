"""Checks of the waits of a stage, over the events of its timetable.

Every recomputation has its window in time and within the ahead depth:

    before   [pipe.recv_backward]
    then     mlp(L)  attention(L)  mlp(L-1)  attention(L-1) ...                           each with its bwd.* windows in order

A frame is *ahead* from the first stretch of its recomputation until backward enters its half. Each stretch needs a window after
that of the previous stretch. With sequence parallelism the first window of a half's own backward gathers its gradient, before
most saved tensors are needed: it may hide the half's own recomputation (`anatomy.in_time`).

Every delayed weight gradient has waits that exist, after its own backward:

    one backward    ... mlp(l)  row-parallel [1]   column-parallel [2]   attention(l) ...   mlp(l-1) ...
                                             │                     └ bwd.mlp.0, the wait for the input's gradient, is in time
                                             └ with sequence parallelism after the wait for the gathered gradient

At [1] and [2] stock computes a weight gradient; there it is delayed. Later waits of the same backward are in time; any wait of a
backward is if another micro-batch follows, and any of a forward if a forward follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_lynx.anatomy import EXPERTS, Section
from megatron_lynx.anatomy.address import (
    BACKWARD_PHASES,
    ON_DEMAND,
    RECV_BACKWARD,
    SEND_BACKWARD,
    BackwardPhase,
    FrameKey,
    Window,
    WindowAddress,
    window_at,
)
from megatron_lynx.anatomy.in_time import own_exchanges_in_time, own_windows_in_time
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.plan.rule import Rule
from megatron_lynx.schedule.flushes import warmup
from megatron_lynx.timetable import Pass as Backward
from megatron_lynx.timetable import PlannedHalf, Timetable


def order_problems(stage: Stage, timetable: Timetable, chunk: int, *, te: bool = False) -> Iterator[str]:
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
    if half.rest_after is not None:
        return 1  # this includes the dropout mask that backward reads first
    if half.section.exchanges and half.layer in timetable.layout.exchanging:
        return own_exchanges_in_time(half.section, half.recompute)
    if not half.section.has_windows:
        return 0
    return own_windows_in_time(half.section, half.recompute, sequence_parallel=timetable.layout.sequence_parallel, te=te)


def _misplaced(stage: Stage, half: PlannedHalf, phase: BackwardPhase, windows: Places, in_time: int) -> Iterator[str]:
    """`in_time`: index of the last window that can hide this frame's recomputation."""
    (layer, name), place, before = half.key, half.place(phase), -1
    gather = place.gather
    if gather is not None and gather != ON_DEMAND and gather not in windows:
        yield f"gather.{name} of layer {layer} ({gather}) is no collective of this stage"
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
        elif windows[window] <= before:
            yield f"{where} does not come after the window of the stretch before it"
        elif gather == ON_DEMAND:
            yield f"{where} cannot hide a recomputation whose input is gathered on demand (none communicates in a window)"
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


def deferral_problems(plan: Plan, stage: Stage, rule: Rule, timetable: Timetable) -> Iterator[str]:
    """Waits of a rule in which its delayed weight gradients cannot run. `timetable`: the stage's."""
    for linear, waits in rule.weight_gradients.items():
        sections = {
            layer: next((candidate for candidate in plan.model.sections_of(layer) if linear in candidate.linears), None)
            for layer in rule.layers
        }
        missing = next((layer for layer, section in sections.items() if section is None), None)
        if missing is not None:
            mlp = "a mixture of experts" if plan.model.has_experts(missing) else "no mixture of experts"
            linears = ", ".join(name for section in plan.model.sections_of(missing) for name in section.linears)
            finding = f"weight_gradients.{linear} is deferred, but the MLP of layer {missing} is {mlp}"
            yield f"{finding}: leave it out, or name one of {linears}"
            continue
        for wait in waits:
            why = (_never(plan, stage, timetable, (layer, one, linear), wait) for layer, one in sections.items() if one)
            if first := next(filter(None, why), None):
                yield f"weight_gradients.{linear} names {wait}, {first}"


def _never(plan: Plan, stage: Stage, timetable: Timetable, where: tuple[int, Section, str], wait: str) -> str | None:
    """Why a weight gradient can never run in that wait, or None if it can. `where`: its layer, section and linear."""
    window, another = window_at(wait, where[0]), plan.batch.microbatches > 1
    if window == RECV_BACKWARD:
        if stage.stage == plan.parallel.pipeline - 1 and stage.chunk == plan.parallel.chunks - 1:
            return "but the last stage receives no gradient"
        return None if another else "but with one micro-batch no gradient is received behind its backward"
    if window == SEND_BACKWARD:
        if plan.schedule == "double_buffered":
            return "but with schedule double_buffered no wait follows the send of a gradient"
        return "but the first stage sends no gradient" if stage.stage == stage.chunk == 0 else None
    assert isinstance(window, WindowAddress)
    if window.passing == "fwd":  # named by its layer's index in its chunk: the forward may be any chunk's of the stage
        place, chunks = window.layer - stage.layers.first, plan.chunks_of(stage.stage)
        layers = [entry.layers.first + place for entry in chunks if 0 <= place < len(entry.layers)]
        if (why := _no_wait(plan, timetable, window, layers)) or _forward_follows(plan, stage):
            return why
        return f"but no forward runs behind a backward (batch.microbatches {plan.batch.microbatches})"
    backward = timetable.backward(stage.chunk, "cooldown")
    windows = [wait.window for half in backward.halves for wait in half.waits if not wait.over]
    if why := _no_wait(plan, timetable, window, [window.layer] if window.layer in stage.layers else []):
        return why
    if window not in windows:
        return "which is no wait of this stage"
    if not another and windows.index(window) < _first_behind(backward, *where, timetable.layout.sequence_parallel):
        return "which comes before its own backward, and there is only one micro-batch"
    return None


def _no_wait(plan: Plan, timetable: Timetable, window: WindowAddress, layers: list[int]) -> str | None:
    """Why none of these layers has a wait like this one, or None if one has."""
    half = window.half
    sections = {layer: next(one for one in plan.model.sections_of(layer) if one.half == half) for layer in layers}
    numbers = [timetable.layout.waits(window.passing, layer, section) for layer, section in sections.items()]
    if any(window.ordinal < number for number in numbers):
        return None
    if layers and half == EXPERTS.half and all(map(plan.model.has_experts, layers)) and not any(numbers):
        return "which lies in a mixture of experts whose tokens do not travel (parallel.expert 1)"
    if plan.parallel.tensor == 1 and not any(numbers):
        return "but tensor 1 has no collectives"
    return "which is no wait of this stage"


def _forward_follows(plan: Plan, stage: Stage) -> bool:
    """Whether this stage runs a forward of any chunk after the first backward of this one."""
    layout, microbatches = plan.parallel, plan.batch.microbatches
    if plan.schedule == "double_buffered":
        return True
    before = (layout.chunks - 1 - stage.chunk) * min(layout.group, microbatches)
    first = warmup(layout.pipeline, stage.stage, layout.chunks, layout.group) + 1 + before
    return first < microbatches * layout.chunks


def _first_behind(backward: Backward, layer: int, section: Section, linear: str, sequence_parallel: bool) -> int:
    """Index, among a backward's windows, of the first one after a linear's weight gradient is delayed: for a column-parallel
    linear the wait for its input's gradient, for a row-parallel one the first after the wait for the gathered gradient, for
    others the next."""
    first, place = section.behind_wgrad(linear, sequence_parallel), 0
    for half in backward.halves:
        ordinals = [wait.window.ordinal for wait in half.waits if not wait.over and not isinstance(wait.window, str)]
        if half.half == (layer, section.half):
            return place + sum(ordinal < first for ordinal in ordinals)
        place += len(ordinals)
    raise LookupError(f"{section.half} of layer {layer} is not in this backward")
