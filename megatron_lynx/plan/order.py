"""Walking one backward of a stage: does every replay find its window, in time and within the ahead depth?

    before   [forward of a later micro-batch: fwd.* windows]  [pipe.recv_backward]        (steady: both; cool-down: the receive)
             (with chunks it may pass another one: then its layers count by their place in the chunk)
    then     mlp(L)  attention(L)  mlp(L-1)  attention(L-1) ...                           each with its bwd.* windows in order

A frame is *ahead* from the first stretch of its replay until backward enters its half. Each stretch has a window of its own,
behind that of the stretch before it. With sequence parallelism the first window of a half's own backward gathers its gradient,
before most saved tensors are needed: it may hide the half's own replay, where `anatomy.in_time` says so.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from megatron_lynx.anatomy import DENSE, EXPERTS, HALVES, Half, Pass, Section
from megatron_lynx.anatomy.address import (
    BACKWARD_PHASES,
    ON_DEMAND,
    RECV_BACKWARD,
    BackwardPhase,
    FrameKey,
    Window,
    WindowAddress,
    window_at,
)
from megatron_lynx.anatomy.in_time import own_exchanges_in_time, own_windows_in_time
from megatron_lynx.plan.facts import ParallelFacts
from megatron_lynx.plan.stage import Stage


def frames_of(stage: Stage) -> Iterator[FrameKey]:
    """The halves of a stage in the order in which backward reaches them."""
    return ((layer, half) for layer in reversed(list(stage.layers)) for half in reversed(HALVES))


Halves = Mapping[Half, Section]
"""What fills the halves of a layer."""


def windows_in_order(
    stage: Stage,
    sequence_parallel: bool,
    phase: BackwardPhase,
    exchanging: Container[int] = (),
    halves: Halves = DENSE,
) -> list[Window]:
    """Every window from which a backward of this stage can be served, in the order in which they come.

    `exchanging`: the layers whose windows in the MLP half are exchanges of tokens. `halves`: what fills those of others.
    """
    order: list[Window] = []
    layers = stage.layers if phase == "steady" else ()
    frames = ((layer, half) for layer in layers for half in HALVES)
    order += [at for frame in frames for at in _windows_in("fwd", frame, sequence_parallel, exchanging, halves)]
    order.append(RECV_BACKWARD)
    for layer, half in frames_of(stage):
        served = 1 if sequence_parallel and _replays_gemm(stage, (layer, half)) else None  # gathered once, before: no wait
        windows = _windows_in("bwd", (layer, half), sequence_parallel, exchanging, halves)
        order += [at for at in windows if at.ordinal != served]
    return order


def _windows_in(
    passing: Pass, frame: FrameKey, sequence_parallel: bool, exchanging: Container[int], halves: Halves
) -> Iterator[WindowAddress]:
    """The windows of one half in one pass, in order."""
    layer, half = frame
    exchanges = half == EXPERTS.half and layer in exchanging
    count = len(EXPERTS.exchanges_of[passing] if exchanges else halves[half].collectives(passing, sequence_parallel))
    return (WindowAddress(passing, layer, half, ordinal) for ordinal in range(count))


def stretches_of(stage: Stage, frame: FrameKey, phase: BackwardPhase) -> list[tuple[Window, str | None]]:
    """Where a plan replays a frame, stretch by stretch: in which window, and until which item."""
    layer, half = frame
    stretches = stage.rule_for(layer).windows.stretches(half, phase)
    return [(window_at(stretch.window, layer), stretch.until) for stretch in stretches]


def window_of(stage: Stage, frame: FrameKey, phase: BackwardPhase) -> Window:
    """Where a plan replays a frame, or the last stretch of its replay."""
    return stretches_of(stage, frame, phase)[-1][0]


def receives_in(stage: Stage, phase: BackwardPhase) -> bool:
    """Whether a plan replays anything of a stage while a gradient is received in that phase."""
    return any(window == RECV_BACKWARD for frame in frames_of(stage) for window, _ in stretches_of(stage, frame, phase))


def gather_of(stage: Stage, frame: FrameKey, phase: BackwardPhase) -> Window | None:
    """Behind which window a plan gathers a frame's input; None where it gathers nothing."""
    layer, half = frame
    name = stage.rule_for(layer).gather.of(half, phase)
    return None if name is None else window_at(name, layer)


def halves_ahead(stage: Stage, frame: FrameKey) -> int:
    """How many halves before its own backward a half's replay may begin, windows and gathers alike; at least 1. What lies in a
    forward or in the receive of a gradient does not count: nothing of that comes between a forward and its own backward."""
    layer, half = frame
    asked = [window for phase in BACKWARD_PHASES for window, _ in stretches_of(stage, frame, phase)]
    asked += [window for phase in BACKWARD_PHASES if (window := gather_of(stage, frame, phase)) is not None]
    served = [window.frame for window in asked if isinstance(window, WindowAddress) and window.passing == "bwd"]
    place = len(HALVES) * layer + HALVES.index(half)
    return max((len(HALVES) * at + HALVES.index(of) + 1 - place for at, of in served), default=1)


def problems(
    stage: Stage, layout: ParallelFacts, *, te: bool = False, exchanging: Container[int] = (), halves: Halves = DENSE
) -> Iterator[str]:
    """Everything that keeps the runtime from following this stage's windows, in words.

    `te`: the layers are Transformer Engine's. `exchanging`, `halves`: see `windows_in_order`.
    """
    ordered = {phase: windows_in_order(stage, layout.sequence_parallel, phase, exchanging, halves) for phase in BACKWARD_PHASES}
    for phase, windows in ordered.items():
        place = {window: index for index, window in enumerate(windows)}
        for frame in frames_of(stage):
            in_time = _last_in_time(stage, frame, layout, place, te, exchanging, halves[frame[1]])
            yield from _misplaced(stage, frame, phase, place, in_time)
    for phase, windows in ordered.items():
        deepest, where = _deepest(stage, phase, windows)
        if deepest > stage.ahead_depth:
            yield f"ahead_depth is {stage.ahead_depth}, but {deepest} frames are regenerated ahead in {phase} at {where}"


def depth(stage: Stage, sequence_parallel: bool, exchanging: Container[int] = (), halves: Halves = DENSE) -> int:
    """How many frames its windows regenerate ahead at once."""
    ordered = {phase: windows_in_order(stage, sequence_parallel, phase, exchanging, halves) for phase in BACKWARD_PHASES}
    return max(_deepest(stage, phase, windows)[0] for phase, windows in ordered.items())


Places = Mapping[Window, int]
"""The windows of a backward, each with its place in their order."""


def _misplaced(stage: Stage, frame: FrameKey, phase: BackwardPhase, windows: Places, in_time: int) -> Iterator[str]:
    """`in_time`: the place of the last window that can hide this frame's replay."""
    layer, half = frame
    gather, before = gather_of(stage, frame, phase), -1
    inside = None if gather is None else WindowAddress("fwd", layer, half, 0)  # the gather of the replayed linear's own forward
    if gather is not None and gather != ON_DEMAND and gather not in windows:
        yield f"gather.{half} of layer {layer} ({gather}) is no collective of this stage"
        return
    if gather is not None and gather == inside:
        yield f"gather.{half} of layer {layer} ({gather}) lies in the very linear whose input it gathers"
        return
    for stretch in stage.rule_for(layer).windows.stretches(half, phase):
        window = window_at(stretch.window, layer)
        if window == ON_DEMAND:
            return
        name = f"windows.{half} of layer {layer} ({stretch}, {phase})"
        if window not in windows:
            yield f"{name} is no window of this stage in this phase"
        elif windows[window] > in_time:
            yield f"{name} comes after backward needs the half"
        elif window == inside:
            yield f"{name} lies in the very linear that is replayed"
        elif windows[window] <= before:
            yield f"{name} does not come after the window of the stretch before it"
        elif gather == ON_DEMAND:
            yield f"{name} cannot hide a replay whose input is gathered on demand (a replay in a window must not communicate)"
        elif gather is not None and windows[gather] >= windows[window]:
            yield f"{name} comes before the half's input is gathered ({gather})"
        else:
            before = windows[window]
            continue
        return


def _replays_gemm(stage: Stage, frame: FrameKey) -> bool:
    layer, half = frame
    rule = stage.rule_for(layer)
    return rule.filling(half).column_parallel in rule.replay


def _last_in_time(
    stage: Stage,
    frame: FrameKey,
    layout: ParallelFacts,
    windows: Places,
    te: bool,
    exchanging: Container[int],
    section: Section,
) -> int:
    """The place of the last window before backward needs a tensor of the half."""
    layer, half = frame
    first_own = windows[WindowAddress("bwd", layer, half, 0)]
    replay = stage.rule_for(layer).replay
    if half == EXPERTS.half and layer in exchanging:
        return first_own - 1 + own_exchanges_in_time(EXPERTS, replay)
    return first_own - 1 + own_windows_in_time(section, replay, sequence_parallel=layout.sequence_parallel, te=te)


def _deepest(stage: Stage, phase: BackwardPhase, windows: Sequence[Window]) -> tuple[int, str]:
    """The most frames that are ahead at once, and the window where it happens. `windows`: all of a backward, in order."""
    served: dict[Window, list[FrameKey]] = {}
    for frame in frames_of(stage):
        if stage.rule_for(frame[0]).replays(frame[1]):
            served.setdefault(stretches_of(stage, frame, phase)[0][0], []).append(frame)
    ahead: set[FrameKey] = set()
    deepest, where = 0, ""
    for window in windows:
        entered = window.frame if isinstance(window, WindowAddress) and window.passing == "bwd" else None
        ahead.discard(entered)
        ahead.update(frame for frame in served.get(window, []) if frame != entered)
        if len(ahead) > deepest:
            deepest, where = len(ahead), str(window)
    return deepest, where
