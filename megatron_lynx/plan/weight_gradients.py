"""Checks of weight gradients that a plan defers: every wait in which one may run must exist, and come after its own backward.

    one backward    ... mlp(l)  row-parallel [1]   column-parallel [2]   attention(l) ...   mlp(l-1) ...
                                             │                     └ bwd.mlp.0, the wait for the input's gradient, is in time
                                             └ with sequence parallelism behind the wait for the gathered gradient

[1] [2] where stock computes a weight gradient is where it is deferred. A wait of the same backward comes in time from there on;
any wait of a backward does where another micro-batch follows, and one of a forward where a forward follows.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import EXPERTS, Half, Pass, Section
from megatron_lynx.anatomy.address import RECV_BACKWARD, Window, WindowAddress, window_at
from megatron_lynx.plan.contents import PlanContents
from megatron_lynx.plan.order import windows_in_order
from megatron_lynx.plan.rule import Rule
from megatron_lynx.plan.stage import Stage
from megatron_lynx.schedule import interleaved, one_f_one_b


def problems(plan: PlanContents, stage: Stage, rule: Rule) -> Iterator[str]:
    """What keeps the weight gradients that a rule defers from running in the waits that it names, in words."""
    for linear, waits in rule.weight_gradients.items():
        sections = {layer: _section_of(plan, layer, linear) for layer in rule.layers}
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
                for why in _never(plan, stage, layer, section, linear, wait)
            )
            yield from (f"weight_gradients.{linear} names {wait}, {text}" for text in list(dict.fromkeys(why))[:1])


def _section_of(plan: PlanContents, layer: int, linear: str) -> Section | None:
    """The section of a layer that has this linear."""
    return next((section for section in plan.model.sections_of(layer) if linear in section.linears), None)


def _never(plan: PlanContents, stage: Stage, layer: int, section: Section, linear: str, wait: str) -> Iterator[str]:
    """Why a weight gradient of this layer can never run in that wait."""
    window, another = window_at(wait, layer), plan.batch.microbatches > 1
    if window == RECV_BACKWARD:
        if stage.stage == plan.parallel.pipeline - 1 and stage.chunk == plan.parallel.chunks - 1:
            yield "but the last stage receives no gradient"
        elif not another:
            yield "but with one micro-batch no gradient is received behind its backward"
        return
    assert isinstance(window, WindowAddress)
    if window.passing == "fwd":
        yield from _never_in_forward(plan, stage, window)
    else:
        yield from _never_in_backward(plan, stage, (layer, section, linear), window, another)


def _no_wait(plan: PlanContents, passing: Pass, layers: list[int], half: Half, ordinal: int) -> str | None:
    """Why a half of none of these layers has a wait of this number; None where one has."""
    numbers = {layer: _waits_in(plan, passing, layer, half) for layer in layers}
    if any(ordinal < number for number in numbers.values()):
        return None
    inside = [layer for layer in layers if half == EXPERTS.half and plan.model.has_experts(layer)]
    if layers and inside == layers and not any(numbers.values()):
        return "which lies in a mixture of experts whose tokens do not travel (parallel.expert 1)"
    if plan.parallel.tensor == 1 and not any(numbers.values()):
        return "but tensor 1 has no collectives"
    return "which is no wait of this stage"


def _waits_in(plan: PlanContents, passing: Pass, layer: int, half: Half) -> int:
    """How many waits a half of a layer has in one pass: exchanges of tokens, or collectives of the tensor-parallel group."""
    if half == EXPERTS.half and plan.model.has_experts(layer):
        return len(EXPERTS.exchanges_of[passing]) if layer in plan.exchanging else 0
    sequence_parallel = plan.parallel.sequence_parallel
    return len(plan.model.halves[half].collectives(passing, sequence_parallel)) if plan.parallel.tensor > 1 else 0


def _never_in_forward(plan: PlanContents, stage: Stage, window: WindowAddress) -> Iterator[str]:
    """A forward's windows are known by where their layer stands in its chunk: the forward may be any chunk's of the stage."""
    place, chunks = window.layer - stage.layers.first, plan.chunks_of(stage.stage)
    there = [entry.layers.first + place for entry in chunks if 0 <= place < len(entry.layers)]
    if why := _no_wait(plan, "fwd", there, window.half, window.ordinal):
        yield why
    elif not _forward_follows(plan, stage):
        yield f"but no forward runs behind a backward (batch.microbatches {plan.batch.microbatches})"


def _forward_follows(plan: PlanContents, stage: Stage) -> bool:
    """Whether this stage runs a forward, of any of its chunks, behind the first backward of this one."""
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
    plan: PlanContents, stage: Stage, where: tuple[int, Section, str], window: WindowAddress, another: bool
) -> Iterator[str]:
    layer, section, linear = where
    windows = windows_in_order(stage, plan.parallel.sequence_parallel, "cooldown", plan.exchanging, plan.model.halves)
    there = [window.layer] if window.layer in stage.layers else []
    if why := _no_wait(plan, "bwd", there, window.half, window.ordinal):
        yield why
    elif window not in windows:
        yield "which is no wait of this stage"
    elif not another and windows.index(window) < _first_behind(plan, windows, layer, section, linear):
        yield "which comes before its own backward, and there is only one micro-batch"


def _first_behind(plan: PlanContents, windows: list[Window], layer: int, section: Section, linear: str) -> int:
    """The place among a backward's windows of the first one behind that where a linear's weight gradient is deferred: of the
    column-parallel one the wait for its input's gradient, of the row-parallel one whatever comes behind the wait for the gathered
    gradient; of a linear that waits for nothing itself whatever comes behind it."""
    first = section.behind_wgrad(linear, plan.parallel.sequence_parallel)
    own = [at for at, window in enumerate(windows) if _is_in(window, layer, section)]
    return next((at for at in own if windows[at].ordinal >= first), own[-1] + 1)  # type: ignore[union-attr]


def _is_in(window: Window, layer: int, section: Section) -> bool:
    """Whether a window lies in the backward of this half."""
    return isinstance(window, WindowAddress) and window.passing == "bwd" and window.frame == (layer, section.half)
