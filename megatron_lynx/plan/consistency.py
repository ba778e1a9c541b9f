"""Checks whether the parts of a plan are consistent.

launch       chunks, head, schedule, stages and layers fit the layout
each rule    its gathers and windows exist in this layout
each stage   if all of that holds: every recomputation finds its window in time and every delayed weight gradient its
             waits (`plan.waits`)
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import EXPERTS, HALVES, Half, Section
from megatron_lynx.anatomy.address import BACKWARD_PHASES, ON_DEMAND, RECV_BACKWARD, WindowAddress, window_at
from megatron_lynx.anatomy.in_time import amax_reducing, resumes_in_wait
from megatron_lynx.fp8_recipes import gathers_once
from megatron_lynx.plan import features, waits
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.plan.rule import Rule
from megatron_lynx.plan.timetables import layout_of, planned_halves, timetable_of
from megatron_lynx.schedule.flushes import groups_needed


def problems(plan: Plan) -> list[str]:
    """Every inconsistency of a plan, in words, with both numbers."""
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
        inconsistencies += [f"stages.{at}: {text}" for text in waits.order_problems(stage, timetable, stage.chunk, te=te)]
        for rule in stage.rules:
            deferring = waits.deferral_problems(plan, stage, rule, timetable)
            inconsistencies += [f"stages.{at} layers {rule.layers}: {text}" for text in deferring]
    return inconsistencies


def of_launch(plan: Plan) -> list[str]:
    """Inconsistent facts of its launch, also before a plan has stages."""
    return [*_impossible_chunks(plan), *features.of_launch(plan), *_uneven_pieces(plan)]


def _impossible_chunks(plan: Plan) -> list[str]:
    layout, microbatches = plan.parallel, plan.batch.microbatches
    if layout.chunks == 1:
        stated = layout.microbatch_group
        return [] if stated is None else [f"parallel.microbatch_group is {stated}, but without chunks nothing takes turns"]
    if layout.pipeline == 1:
        return [f"parallel.chunks is {layout.chunks}, but one stage has nothing to take turns with (pipeline 1)"]
    if layout.group < layout.pipeline:
        return [f"parallel.microbatch_group ({layout.group}) must be at least pipeline ({layout.pipeline})"]
    needed = groups_needed(microbatches, layout.group, layout.pipeline)
    return [f"batch.microbatches ({microbatches}) must be {needed} with {layout.chunks} chunks on each stage"] if needed else []


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
    if chunks == 1:
        found_stages, needed_stages = [stage for stage, _ in plan_stages], [stage for stage, _ in needed]
        return [f"stages are numbered {found_stages}, but pipeline {pipeline} needs {needed_stages}"]
    return [f"stages are numbered (stage, chunk) {plan_stages}, but pipeline {pipeline} with {chunks} chunks needs {needed}"]


def _broken_layers(plan: Plan) -> list[str]:
    owned = [layer for stage in plan.stages for layer in stage.layers]
    if owned == list(range(1, plan.model.layers + 1)):
        return []
    spans = ", ".join(str(stage.layers) for stage in plan.stages)
    return [f"the stages own layers {spans}, but the model has layers 1-{plan.model.layers}, each owned once and in order"]


def _unhonoured(plan: Plan, stage: Stage, rule: Rule) -> Iterator[str]:
    """Requests of a rule that the runtime cannot meet in this layout."""
    yield from _nothing_ahead(plan, stage, rule)
    for half in HALVES:
        yield from _rest_without_wait(plan, rule, half)
        yield from _exchanging_again(plan, rule, half)
        yield from _unmade_inputs(plan, rule, half)
        yield from _reduced_amaxes(plan, rule, half)
        places = features.places(rule, half)
        if stage.ahead_depth == 0 and any(key == "windows" and name != ON_DEMAND for key, name in places):
            yield f"windows.{half} asks for a recomputation ahead of time, but ahead_depth is 0"
        for key, name in places:
            yield from (f"{key}.{half} is {name}, {why}" for why in _no_window(plan, stage, rule, name))


def _rest_without_wait(plan: Plan, rule: Rule, half: Half) -> Iterator[str]:
    """Layers of a checkpoint whose rest should run in its first wait, and that have no such wait."""
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
    """The sections of a half in the rule's layers, each once."""
    sections = (section for layer in rule.layers for section in plan.model.sections_of(layer) if section.half == half)
    return list(dict.fromkeys(sections))


def _nothing_ahead(plan: Plan, stage: Stage, rule: Rule) -> Iterator[str]:
    """Problems of a rule's `ahead`: nothing in its layers can begin ahead."""
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
    """Recomputed items in which context-parallel ranks exchange keys and values (rule R2)."""
    again = [item for section in _sections(plan, rule, half) for item in section.exchanging if item in rule.recompute]
    if plan.parallel.context > 1 and again:
        finding = f"found {', '.join(again)} recomputed, needed kept with parallel.context {plan.parallel.context}"
        yield f"{finding}: its exchange must not run again; keep it, and let offload take what it saves, if that is much"


def _unmade_inputs(plan: Plan, rule: Rule, half: Half) -> Iterator[str]:
    """Recomputed GEMMs without their input: the norm before them, and with sequence parallelism a gather."""
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
    """Recomputations in a window that would reduce an amax there."""
    facts = rule.recompute, plan.model.fp8
    sliced = plan.parallel.sequence_parallel
    reducing = [
        item for section in _sections(plan, rule, half) for item in amax_reducing(section, *facts, sequence_parallel=sliced)
    ]
    if not reducing:
        return
    windows = {rule.windows.of(half, phase) for phase in BACKWARD_PHASES}
    for place, names in (("windows", windows), ("gather", {rule.gather.of(half)})):
        if reducing_windows := names - {ON_DEMAND, None}:
            todo = f"plan it on demand, or keep it, with fp8 {plan.model.fp8} and sequence_parallel"
            why = f"but {reducing[0]} reduces an amax in every call"
            yield f"{place}.{half} is {', '.join(sorted(map(str, reducing_windows)))}, {why}: {todo}"


def _no_window(plan: Plan, stage: Stage, rule: Rule, name: str) -> Iterator[str]:
    """Why a window of this name never opens for a rule's layers."""
    layout = plan.parallel
    last = stage.stage == layout.pipeline - 1 and stage.chunk == layout.chunks - 1
    if name == RECV_BACKWARD and last:
        yield "but the last stage receives no gradient"
    if name not in (ON_DEMAND, RECV_BACKWARD) and layout.tensor == 1 and not _exchanged(plan, rule, name):
        yield "but tensor 1 has no collectives"


def _exchanged(plan: Plan, rule: Rule, name: str) -> bool:
    """Whether a window of this name is an exchange of tokens, in every layer of a rule."""
    windows = [window_at(name, layer) for layer in rule.layers]
    return all(isinstance(one, WindowAddress) and one.half == EXPERTS.half and one.layer in plan.exchanging for one in windows)
