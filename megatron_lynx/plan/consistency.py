"""Checks whether the parts of a plan are consistent.

A frame is *ahead* from the first stretch of its recomputation until backward enters its half. With sequence parallelism the first
window of a half's own backward may hide the half's own recomputation (`anatomy.address`).

Every delayed weight gradient has waits that exist, after its own backward:

    one backward    ... mlp(l)  row-parallel [1]   column-parallel [2]   attention(l) ...   mlp(l-1) ...
                                             │                     └ bwd.mlp.0, the wait for the input's gradient, is in time
                                             └ with sequence parallelism after the wait for the gathered gradient

At [1] and [2] stock computes a weight gradient; there it is delayed. Later waits of the same backward are in time; any wait of a
backward is if another micro-batch follows, and any of a forward if a forward follows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import inf

from megatron_lynx.anatomy import EXPERTS, HALVES, Half, Section
from megatron_lynx.anatomy.address import (
    ON_DEMAND,
    RECV_BACKWARD,
    SEND_BACKWARD,
    FrameKey,
    Window,
    WindowAddress,
    amax_reducing,
    own_waits_in_time,
    resumes_in_wait,
    window_at,
)
from megatron_lynx.fp8_recipes import gathers_once
from megatron_lynx.plan import features
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.plan.rule import Rule
from megatron_lynx.plan.timetables import layout_of, planned_halves, timetable_of
from megatron_lynx.schedule.flushes import warmup
from megatron_lynx.timetable import PlannedHalf, Timetable


def problems(plan: Plan) -> list[str]:
    inconsistencies = [*of_launch(plan), *_missing_stages(plan), *_broken_layers(plan)]
    for at, stage in enumerate(plan.stages):
        for rule in stage.rules:
            unmet = [*features.latent_rule(plan, rule), *features.opaque_rule(plan, rule)]
            unmet = unmet or [*_unhonoured(plan, stage, rule), *features.experts_rule(plan, rule)]
            unmet += features.of_rule(plan, rule)
            inconsistencies += [f"stages.{at} layers {rule.layers}: {text}" for text in unmet]
    if inconsistencies:
        return inconsistencies
    te = plan.model.implementation == "transformer_engine"
    timetables = [timetable_of(plan, stage) for stage in range(plan.parallel.pipeline)]
    for at, stage in enumerate(plan.stages):
        timetable = timetables[stage.stage]
        unfollowed = order_problems(stage, timetable, stage.chunk, te=te, receives=_receives(plan, stage))
        inconsistencies += [f"stages.{at}: {text}" for text in unfollowed]
        for rule in stage.rules:
            deferring = deferral_problems(plan, stage, rule, timetable)
            inconsistencies += [f"stages.{at} layers {rule.layers}: {text}" for text in deferring]
    return inconsistencies


def of_launch(plan: Plan) -> list[str]:
    return [*features.of_launch(plan), *_uneven_pieces(plan)]


def _uneven_pieces(plan: Plan) -> Iterator[str]:
    if plan.head is None:
        return
    rows, pieces = plan.model.seq // plan.parallel.context, plan.head.pieces
    if plan.model.mtp:
        yield f"head.pieces is {pieces}, needed a whole head with model.mtp {plan.model.mtp}: other losses read the same rows"
    if rows % pieces:
        yield f"head.pieces ({pieces}) must divide the tokens of a sequence on one rank ({rows})"
    if plan.schedule == "double_buffered":
        yield f"head.pieces is {pieces}, but schedule is double_buffered: logits are computed again in backward, needed flush"


def _missing_stages(plan: Plan) -> list[str]:
    pipeline, chunks = plan.parallel.pipeline, plan.parallel.chunks
    plan_stages = [(stage.stage, stage.chunk) for stage in plan.stages]
    needed = [(stage, chunk) for chunk in range(chunks) for stage in range(pipeline)]
    if plan_stages == needed:
        return []
    return [f"stages are numbered (stage, chunk) {plan_stages}, but pipeline {pipeline} with {chunks} chunks needs {needed}"]


def _broken_layers(plan: Plan) -> list[str]:
    owned = [layer for stage in plan.stages for layer in stage.layers]
    if owned == list(range(1, plan.model.layers + 1)):
        return []
    spans = ", ".join(str(stage.layers) for stage in plan.stages)
    return [f"the stages own layers {spans}, but the model has layers 1-{plan.model.layers}, each owned once and in order"]


def _unhonoured(plan: Plan, stage: Stage, rule: Rule) -> Iterator[str]:
    yield from _nothing_ahead(plan, stage, rule)
    for half in HALVES:
        yield from _rest_without_wait(plan, rule, half)
        yield from _exchanging_again(plan, rule, half)
        yield from _unmade_inputs(plan, rule, half)
        yield from _reduced_amaxes(plan, rule, half)
        if stage.ahead_depth == 0 and any(key == "windows" and name != ON_DEMAND for key, name in features.places(rule, half)):
            yield f"windows.{half} asks for a recomputation ahead of time, but ahead_depth is 0"


def _rest_without_wait(plan: Plan, rule: Rule, half: Half) -> Iterator[str]:
    window, layout = rule.wait_of_rest(half), layout_of(plan)
    if window is None:
        return

    def has_wait(layer: int, section: Section) -> bool:
        exchanges, gathers = layout.waits("bwd", layer, section) > 0, layout.sequence_parallel and layout.collectives
        userbuffers = plan.parallel.userbuffers or bool(plan.model.adapted)
        return resumes_in_wait(section, plan.model.fp8, exchanges=exchanges, gathers=gathers, userbuffers=userbuffers)

    halves = ((layer, section) for layer in rule.layers for section in plan.model.sections_of(layer) if section.half == half)
    if lacking := [layer for layer, section in halves if not has_wait(layer, section)]:
        finding = (
            f"windows.{half} is {window}, but {rule.checkpoint_said}, and no gradient travels there: {features.spans(lacking)}"
        )
        needed = "tokens that are dispatched in windows, or parallel.sequence_parallel without fp8"
        yield f"{finding}: needed {needed}, or no window"


def _sections(plan: Plan, rule: Rule, half: Half) -> list[Section]:
    sections = (section for layer in rule.layers for section in plan.model.sections_of(layer) if section.half == half)
    return list(dict.fromkeys(sections))


def _nothing_ahead(plan: Plan, stage: Stage, rule: Rule) -> Iterator[str]:
    if not rule.ahead:
        return
    layout, halves = layout_of(plan), tuple(planned_halves(stage, plan.model.sections_of))
    begun = (half for half in halves if half.layer in rule.layers and half.leaves_under_way)
    if not any(layout.waits("fwd", half.layer, half.section) for half in begun):
        needed = "a dispatch that a plan may look into, or a layer under tensor parallelism"
        yield f"{rule.ahead_said}, but nothing that runs again there is waited for: needed {needed}"
    elif rule.gathers_ahead and not layout.sequence_parallel:
        yield f"{rule.ahead_said}, but without parallel.sequence_parallel nothing is gathered: needed true"
    elif rule.gathers_ahead and not any(half.gathers_ahead for half in halves if half.layer in rule.layers):
        yield f"{rule.ahead_said}, but no attention of these layers gathers for a single linear, without experts: needed true"
    elif rule.gathers_ahead and not gathers_once(plan.model.fp8):
        yield f"{rule.ahead_said}, but with fp8 {plan.model.fp8} a linear gathers more than its input by rows: needed true"


def _exchanging_again(plan: Plan, rule: Rule, half: Half) -> Iterator[str]:
    again = [item for section in _sections(plan, rule, half) for item in section.exchanging if item in rule.recompute]
    if plan.parallel.context > 1 and again:
        finding = f"found {', '.join(again)} recomputed, needed kept with parallel.context {plan.parallel.context}"
        yield f"{finding}: its exchange must not run again; keep it, and let offload take what it saves, if that is much"


def _unmade_inputs(plan: Plan, rule: Rule, half: Half) -> Iterator[str]:
    gather, sequence_parallel = getattr(rule.gather, half), plan.parallel.sequence_parallel
    for section in _sections(plan, rule, half):
        norm, linear, te = section.norm, section.gathered, plan.model.implementation == "transformer_engine"
        if te and section.fuses_norm and linear in rule.recompute and norm not in rule.recompute:
            yield f"{linear} is recomputed, and {norm} with it: Transformer Engine makes the norm inside the linear"
        if sequence_parallel and linear in rule.recompute and not gathers_once(plan.model.fp8):
            finding = f"{linear} is recomputed under sequence_parallel with fp8 {plan.model.fp8}"
            yield f"{finding}: keep it, one gather does not serve both of its GEMMs"
        elif sequence_parallel and linear in rule.recompute and gather is None:
            yield f"{linear} is recomputed under sequence_parallel, so gather.{half} must say where its input is"
    if not sequence_parallel and gather is not None:
        yield f"gather.{half} is given without sequence parallelism"


def _reduced_amaxes(plan: Plan, rule: Rule, half: Half) -> Iterator[str]:
    facts = rule.recompute, plan.model.fp8
    sliced = plan.parallel.sequence_parallel
    reducing = [
        item for section in _sections(plan, rule, half) for item in amax_reducing(section, *facts, sequence_parallel=sliced)
    ]
    if not reducing:
        return
    for place, window in (("windows", rule.windows.of(half)), ("gather", rule.gather.of(half))):
        if window not in (ON_DEMAND, None):
            todo = f"plan it on demand, or keep it, with fp8 {plan.model.fp8} and sequence_parallel"
            yield f"{place}.{half} is {window}, but {reducing[0]} reduces an amax in every call: {todo}"


def order_problems(stage: Stage, timetable: Timetable, chunk: int, *, te: bool = False, receives: bool = True) -> Iterator[str]:
    """Every window of an entry that the runtime cannot follow. `chunk`: the entry's index in the timetable. `receives`: whether
    its gradients are received."""
    windows = {wait.window for _, _, waits in timetable.serving(chunk) for wait in waits if not wait.over}
    for half in reversed(timetable.chunks[chunk]):
        yield from _misplaced(stage, half, windows if receives else windows - {RECV_BACKWARD}, _needed_at(half, timetable, te))
    deepest, where = _deepest(timetable, chunk)
    if deepest > stage.ahead_depth:
        yield f"ahead_depth is {stage.ahead_depth}, but {deepest} frames are regenerated ahead at {where}"


def depth(timetable: Timetable, chunk: int = 0) -> int:
    return _deepest(timetable, chunk)[0]


Place = tuple[float, int, int]
"""Sort key of a backward's waits."""


def _place(window: Window) -> Place:
    """The receive of its gradient comes first."""
    if not isinstance(window, WindowAddress):
        return -inf, 0, 0
    return -window.layer, -HALVES.index(window.half), window.ordinal


def _needed_at(half: PlannedHalf, timetable: Timetable, te: bool) -> Place:
    """Where backward needs a recomputed tensor of the half."""
    layout = timetable.layout
    exchanged, sliced = half.layer in layout.exchanging, layout.sequence_parallel
    own = own_waits_in_time(half.section, half.recompute, exchanged=exchanged, sequence_parallel=sliced, te=te)
    if half.rest_after is not None:
        own = 1  # this includes the dropout mask that backward reads first
    return _place(WindowAddress("bwd", *half.key, own))


def _misplaced(stage: Stage, half: PlannedHalf, windows: Collection[Window], needed_at: Place) -> Iterator[str]:
    """`windows`: those of the backward. `needed_at`: the first place that is too late for this half's recomputation."""
    (layer, name), gather, before = half.key, half.gathered, (-inf, -1, 0)
    if gather is not None and gather != ON_DEMAND and gather not in windows:
        yield f"gather.{name} of layer {layer} ({gather}) is no collective of this stage"
        return
    as_named = stage.rule_for(layer).windows.stretches(name)
    for (window, _), stretch in zip(half.stretches, as_named, strict=True):
        if window == ON_DEMAND:
            return
        where = f"windows.{name} of layer {layer} ({stretch})"
        if window not in windows:
            why = ": the last stage receives no gradient" if window == RECV_BACKWARD else ""
            yield f"{where} is no window of this stage{why}"
        elif _place(window) >= needed_at:
            yield f"{where} comes after backward needs the half"
        elif _place(window) <= before:
            yield f"{where} does not come after the window of the stretch before it"
        elif gather == ON_DEMAND:
            yield f"{where} cannot hide a recomputation whose input is gathered on demand (none communicates in a window)"
        elif gather is not None and _place(gather) >= _place(window):
            yield f"{where} comes before the half's input is gathered ({gather})"
        else:
            before = _place(window)
            continue
        return


def _deepest(timetable: Timetable, chunk: int) -> tuple[int, str]:
    ahead: set[FrameKey] = set()
    deepest, where = 0, ""
    for through, entered, waits in timetable.serving(chunk):
        ahead -= {entered}
        for wait in waits:
            recomputed = (task for task in through.at("in", wait.window) if task.do == "recompute")
            ahead.update(task.half for task in recomputed if task.since is None and task.half != entered)
            if len(ahead) > deepest:
                deepest, where = len(ahead), str(wait.window)
    return deepest, where


def deferral_problems(plan: Plan, stage: Stage, rule: Rule, timetable: Timetable) -> Iterator[str]:
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
    window, another = window_at(wait, where[0]), plan.batch.microbatches > 1
    if window == RECV_BACKWARD:
        if not _receives(plan, stage):
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
    if why := _no_wait(plan, timetable, window, [window.layer] if window.layer in stage.layers else []):
        return why
    halves = timetable.backward(stage.chunk).halves
    if all(wait.window != window or wait.over for half in halves for wait in half.waits):
        return "which is no wait of this stage"
    layer, section, linear = where
    delayed_at = WindowAddress("bwd", layer, section.half, section.behind_wgrad(linear, timetable.layout.sequence_parallel))
    if not another and _place(window) < _place(delayed_at):
        return "which comes before its own backward, and there is only one micro-batch"
    return None


def _receives(plan: Plan, stage: Stage) -> bool:
    return (stage.stage, stage.chunk) != (plan.parallel.pipeline - 1, plan.parallel.chunks - 1)


def _no_wait(plan: Plan, timetable: Timetable, window: WindowAddress, layers: list[int]) -> str | None:
    at, experts = HALVES.index(window.half), window.half == EXPERTS.half and all(map(plan.model.has_experts, layers))
    numbers = [timetable.layout.waits(window.passing, layer, plan.model.sections_of(layer)[at]) for layer in layers]
    if any(window.ordinal < number for number in numbers):
        return None
    if layers and experts and not any(numbers):
        return "which lies in a mixture of experts whose tokens do not travel (parallel.expert 1)"
    if plan.parallel.tensor == 1 and not any(numbers):
        return "but tensor 1 has no collectives"
    return "which is no wait of this stage"


def _forward_follows(plan: Plan, stage: Stage) -> bool:
    layout, microbatches = plan.parallel, plan.batch.microbatches
    if plan.schedule == "double_buffered":
        return True
    before = (layout.chunks - 1 - stage.chunk) * min(layout.group, microbatches)
    first = warmup(layout.pipeline, stage.stage, layout.chunks, layout.group) + 1 + before
    return first < microbatches * layout.chunks
