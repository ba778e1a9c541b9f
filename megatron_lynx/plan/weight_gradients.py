"""Checks of delayed weight gradients: each of their waits must exist, and come after their own backward.

    one backward    ... mlp(l)  row-parallel [1]   column-parallel [2]   attention(l) ...   mlp(l-1) ...
                                             │                     └ bwd.mlp.0, the wait for the input's gradient, is in time
                                             └ with sequence parallelism after the wait for the gathered gradient

At [1] and [2] stock computes a weight gradient; there it is delayed. Later waits of the same backward are in time; any wait of a
backward is if another micro-batch follows, and any of a forward if a forward follows.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import EXPERTS, Half, Pass, Section
from megatron_lynx.anatomy.address import RECV_BACKWARD, WindowAddress, window_at
from megatron_lynx.plan.contents import PlanContents
from megatron_lynx.plan.rule import Rule
from megatron_lynx.plan.stage import Stage
from megatron_lynx.schedule import interleaved, one_f_one_b
from megatron_lynx.timetable import Pass as Backward
from megatron_lynx.timetable import Timetable


def problems(plan: PlanContents, stage: Stage, rule: Rule, timetable: Timetable) -> Iterator[str]:
    """Waits of a rule in which its delayed weight gradients cannot run. `timetable`: the stage's."""
    for linear, waits in rule.weight_gradients.items():
        having = {layer: [each for each in plan.model.sections_of(layer) if linear in each.linears] for layer in rule.layers}
        sections = {layer: next(iter(found), None) for layer, found in having.items()}
        missing = next((layer for layer, section in sections.items() if section is None), None)
        if missing is not None:
            mlp = "a mixture of experts" if plan.model.has_experts(missing) else "no mixture of experts"
            linears = ", ".join(name for section in plan.model.sections_of(missing) for name in section.linears)
            found = f"weight_gradients.{linear} is deferred, but the MLP of layer {missing} is {mlp}"
            yield f"{found}: leave it out, or name one of {linears}"
            continue
        for wait in waits:
            why = (
                why
                for layer, section in sections.items()
                if section is not None
                for why in _never(plan, stage, timetable, (layer, section, linear), wait)
            )
            yield from (f"weight_gradients.{linear} names {wait}, {text}" for text in list(dict.fromkeys(why))[:1])


def _never(plan: PlanContents, stage: Stage, timetable: Timetable, where: tuple[int, Section, str], wait: str) -> Iterator[str]:
    layer, _, _ = where
    window, another = window_at(wait, layer), plan.batch.microbatches > 1
    if window == RECV_BACKWARD:
        if stage.stage == plan.parallel.pipeline - 1 and stage.chunk == plan.parallel.chunks - 1:
            yield "but the last stage receives no gradient"
        elif not another:
            yield "but with one micro-batch no gradient is received behind its backward"
        return
    assert isinstance(window, WindowAddress)
    if window.passing == "fwd":
        yield from _never_in_forward(plan, stage, timetable, window)
    else:
        yield from _never_in_backward(plan, stage, timetable, where, window, another)


def _no_wait(plan: PlanContents, timetable: Timetable, passing: Pass, layers: list[int], half: Half, ordinal: int) -> str | None:
    """Why none of these layers' halves has a wait of this number, or None if one has."""
    sections = {layer: next(one for one in plan.model.sections_of(layer) if one.half == half) for layer in layers}
    numbers = {layer: timetable.layout.waits(passing, layer, section) for layer, section in sections.items()}
    if any(ordinal < number for number in numbers.values()):
        return None
    inside = [layer for layer in layers if half == EXPERTS.half and plan.model.has_experts(layer)]
    if layers and inside == layers and not any(numbers.values()):
        return "which lies in a mixture of experts whose tokens do not travel (parallel.expert 1)"
    if plan.parallel.tensor == 1 and not any(numbers.values()):
        return "but tensor 1 has no collectives"
    return "which is no wait of this stage"


def _never_in_forward(plan: PlanContents, stage: Stage, timetable: Timetable, window: WindowAddress) -> Iterator[str]:
    """A forward's windows are named by their layer's index in its chunk: the forward may be any chunk's of the stage."""
    place, chunks = window.layer - stage.layers.first, plan.chunks_of(stage.stage)
    there = [entry.layers.first + place for entry in chunks if 0 <= place < len(entry.layers)]
    if why := _no_wait(plan, timetable, "fwd", there, window.half, window.ordinal):
        yield why
    elif not _forward_follows(plan, stage):
        yield f"but no forward runs behind a backward (batch.microbatches {plan.batch.microbatches})"


def _forward_follows(plan: PlanContents, stage: Stage) -> bool:
    """Whether this stage runs a forward of any chunk after the first backward of this one."""
    layout, microbatches = plan.parallel, plan.batch.microbatches
    if plan.schedule == "double_buffered":
        return True
    if layout.chunks == 1:
        return one_f_one_b.warmup(layout.pipeline, stage.stage) + 1 < microbatches
    before = (layout.chunks - 1 - stage.chunk) * min(layout.group, microbatches)
    return (
        interleaved.warmup(layout.pipeline, stage.stage, layout.chunks, layout.group) + 1 + before < microbatches * layout.chunks
    )


def _never_in_backward(
    plan: PlanContents,
    stage: Stage,
    timetable: Timetable,
    where: tuple[int, Section, str],
    window: WindowAddress,
    another: bool,
) -> Iterator[str]:
    backward = timetable.backward(stage.chunk, "cooldown")
    windows = [wait.window for half in backward.halves for wait in half.waits if not wait.over]
    there = [window.layer] if window.layer in stage.layers else []
    if why := _no_wait(plan, timetable, "bwd", there, window.half, window.ordinal):
        yield why
    elif window not in windows:
        yield "which is no wait of this stage"
    elif not another and windows.index(window) < _first_behind(backward, *where, timetable.layout.sequence_parallel):
        yield "which comes before its own backward, and there is only one micro-batch"


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
