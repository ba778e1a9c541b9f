"""Random valid plans: `@given(plans())`, or `@given(plans_for(job))` for a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_lynx.anatomy import DENSE, EXPERTS, HALVES, LINEARS, Half, Pass, Section
from megatron_lynx.anatomy.address import (
    ON_DEMAND,
    RECV_BACKWARD,
    Stretch,
    WindowAddress,
    in_words,
    stretches_in,
    window_at,
)
from megatron_lynx.config.job import Job
from megatron_lynx.fp8_recipes import gathers_once
from megatron_lynx.plan.consistency import deferral_problems, order_problems
from megatron_lynx.plan.facts import PlannedDevice
from megatron_lynx.plan.plan import (
    BatchFacts,
    Head,
    LayerRange,
    ModelFacts,
    ParallelFacts,
    Plan,
    Predicted,
    Provenance,
    Rule,
    Stage,
    WeightGradients,
    Whole,
)
from megatron_lynx.plan.rule import CheckpointGroups, Gather
from megatron_lynx.plan.timetables import planned_halves, timetable_of
from megatron_lynx.planner.writing import model_facts
from megatron_lynx.timetable import Layout, Timetable

T = TypeVar("T")

SECONDS = st.floats(0, 1e3, allow_nan=False)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)


def samples(strategy: st.SearchStrategy[T], number: int, seed: int = 0) -> list[T]:
    """So many examples for runs of real ranks, always the same of a seed. Hypothesis draws the simplest one first: it is left
    out."""
    found: list[T] = []

    @seeded(seed)
    @drawn(number + 1)
    @given(strategy)
    def keep(example: T) -> None:
        found.append(example)

    keep()
    return found[1:]


def drawn(times: int) -> settings:
    """Always the same examples, so many times, and never shrunk."""
    return settings(
        max_examples=times,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )


@st.composite
def plans(
    draw: st.DrawFn,
    model: ModelFacts | None = None,
    parallel: ParallelFacts | None = None,
    batch: BatchFacts | None = None,
    partition: tuple[int, ...] | None = None,
    whole: bool = False,
    defers: bool = False,
    pieces: bool = False,
    checkpoints: bool = False,
) -> Plan:
    """A valid plan. `partition`: layers of each virtual stage. With `whole`, some micro-batches may keep everything; with
    `defers`, weight gradients may be deferred; with `pieces`, the head may be in some; with `checkpoints`, layers or halves of
    them may be checkpointed."""
    parallel = parallel or draw(layouts())
    model = model or draw(models(parallel.pipeline))
    batch = batch or draw(st.builds(BatchFacts, micro=st.integers(1, 4), microbatches=st.integers(1, 8)))
    owned = cut(partition) if partition else draw(splits(model.layers, parallel.pipeline * parallel.chunks))
    te = model.implementation == "transformer_engine"
    stages = [draw(stages_of(number, layers, parallel, te, model, checkpoints)) for number, layers in enumerate(owned)]
    if whole:
        stages = [stage.model_copy(update={"whole": draw(st.none() | st.just(Whole(of_every=2, first=1)))}) for stage in stages]
    provenance = st.builds(Provenance, made_by=TEXT, job=st.none() | DIGESTS, profile=st.none() | DIGESTS, note=st.none() | TEXT)
    device = draw(st.sampled_from([None, DEVICE]))
    head = draw(st.none() | st.builds(Head, pieces=st.sampled_from([2, 4, 8]))) if pieces else None
    parts = {"model": model, "parallel": parallel, "batch": batch, "head": head, "stages": tuple(stages), "device": device}
    try:
        plan = Plan(version=1, **parts, provenance=draw(provenance))
    except ValidationError:  # there is nothing that may begin ahead
        plan = Plan(version=1, **parts | {"stages": tuple(map(_beginning_nothing, stages))}, provenance=draw(provenance))
    return draw(deferring(plan)) if defers and draw(st.booleans()) else plan


def plans_for(job: Job, *, whole: bool = False, defers: bool = False, checkpoints: bool = False) -> st.SearchStrategy[Plan]:
    """Plans that a run of this job takes."""
    shared = job.model.experts is not None and job.model.experts.shared_ffn > 0
    return plans(
        model=model_facts(job).model_copy(update={"shared_experts": shared}),
        parallel=ParallelFacts(chunks=job.chunks, **job.parallel.model_dump(include=ParallelFacts.model_fields.keys())),
        batch=BatchFacts(micro=job.batch.micro, microbatches=job.microbatches),
        partition=job.partition,
        whole=whole,
        defers=defers,
        checkpoints=checkpoints,
    )


@st.composite
def deferring(draw: st.DrawFn, plan: Plan) -> Plan:
    """The same plan, in which some linears defer their weight gradients into waits that come behind their own backward."""
    stages = [draw(_deferring(plan, stage)) for stage in plan.stages]
    return Plan.model_validate(plan.model_copy(update={"stages": tuple(stages)}).model_dump())


@st.composite
def _deferring(draw: st.DrawFn, plan: Plan, stage: Stage) -> Stage:
    offsets, timetable = ("", "+1", "-1"), timetable_of(plan, stage.stage)
    names = [
        f"{name}{offset}"
        for name in (*_collectives("fwd", plan.parallel, plan.model), *_collectives("bwd", plan.parallel, plan.model))
        for offset in offsets
    ]
    rules = []
    for rule in stage.rules:
        waits = {}
        for linear in draw(st.sets(st.sampled_from(LINEARS))):
            some = draw(st.lists(st.sampled_from([RECV_BACKWARD, *names]), min_size=1, max_size=6, unique=True))
            asked = {wait: rule.model_copy(update={"weight_gradients": {linear: (wait,)}}) for wait in some}
            if coming := tuple(wait for wait, one in asked.items() if not list(deferral_problems(plan, stage, one, timetable))):
                waits[linear] = coming
        rules.append(rule.model_copy(update={"weight_gradients": waits}))
    bound = WeightGradients(bytes=draw(st.integers(1 << 20, 1 << 30))) if any(rule.weight_gradients for rule in rules) else None
    return stage.model_copy(update={"rules": tuple(rules), "weight_gradients": bound})


@st.composite
def layouts(draw: st.DrawFn) -> ParallelFacts:
    tensor = draw(st.sampled_from([1, 2, 4]))
    return ParallelFacts(tensor=tensor, pipeline=draw(st.integers(1, 3)), sequence_parallel=tensor > 1 and draw(st.booleans()))


@st.composite
def models(draw: st.DrawFn, stages: int) -> ModelFacts:
    layers = draw(st.integers(stages, 3 * stages + 2))
    return ModelFacts(layers=layers, hidden=64, ffn=256, heads=8, kv_groups=draw(st.sampled_from([1, 4, 8])), seq=32)


@st.composite
def splits(draw: st.DrawFn, layers: int, parts: int, first: int = 1) -> list[LayerRange]:
    """`layers` layers from number `first` on, cut into `parts` ranges."""
    inner = st.integers(1, layers - 1) if layers > 1 else st.nothing()
    cuts = draw(st.sets(inner, min_size=parts - 1, max_size=parts - 1))
    return cut([high - low for low, high in pairwise([0, *sorted(cuts), layers])], first)


def cut(counts: Sequence[int], first: int = 1) -> list[LayerRange]:
    """So many layers each, from number `first` on."""
    ends = list(accumulate(counts, initial=first - 1))
    return [LayerRange(first=low + 1, last=high) for low, high in pairwise(ends)]


@st.composite
def stages_of(
    draw: st.DrawFn,
    number: int,
    layers: LayerRange,
    parallel: ParallelFacts,
    te: bool = False,
    model: ModelFacts | None = None,
    checkpoints: bool = False,
) -> Stage:
    """`number`: of the virtual stage. `te`: of Transformer Engine's layers.
    `model`: says which layers have experts."""
    last = number == parallel.pipeline * parallel.chunks - 1
    ranges = draw(splits(len(layers), draw(st.integers(1, min(3, len(layers)))), first=layers.first))
    predicted = draw(
        st.just(Predicted())
        | st.builds(Predicted, step_s=SECONDS, hidden_recompute_s=SECONDS, ahead_bytes=st.integers(0), memory=st.just(HELD))
    )
    kept = [draw(_with_experts(draw(kept_items(span, te, parallel, model)), model)) for span in ranges]
    kept = [draw(checkpointed(rule, parallel, model)) for rule in kept] if checkpoints else kept
    chunk, at = divmod(number, parallel.pipeline)
    stage = Stage(stage=at, chunk=chunk, layers=layers, ahead_depth=0, rules=tuple(kept), predicted=predicted)
    stage = stage.model_copy(update={"rules": tuple(_on_demand(rule, parallel) for rule in stage.rules)})
    for index in range(len(ranges)):
        for half in HALVES:
            if stage.rules[index].recomputed_in(half):
                stage = draw(with_windows(stage, index, half, last, parallel, te, model))
    needed = next(depth for depth in range(2 * len(layers) + 1) if not _problems(stage, parallel, depth, te, model))
    return stage.model_copy(update={"ahead_depth": needed + (needed > 0) * draw(st.integers(0, 2))})


@st.composite
def kept_items(draw: st.DrawFn, layers: LayerRange, te: bool, parallel: ParallelFacts, model: ModelFacts | None = None) -> Rule:
    """Everything kept, everything recomputed, or any mixture."""
    sections = {**DENSE, "attention": attention_of(model)}
    sliced = parallel.sequence_parallel and sections["attention"].two_paths
    free = [
        item for section in sections.values() for item in section.recomputable_among(parallel.context, sequence_parallel=sliced)
    ]
    recompute = draw(st.just(free) | st.just([]) | st.lists(st.sampled_from(free), unique=True))
    norms = {section.column_parallel: section.norm for section in sections.values() if section.fuses_norm} if te else {}
    norms |= {item.name: item.norm_inside for section in sections.values() for item in section.items if te and item.norm_inside}
    recompute = [*recompute, *(norm for linear, norm in norms.items() if linear in recompute and norm not in recompute)]
    names = [name for section in sections.values() for name in section.names]
    return Rule(layers=layers, keep=tuple(item for item in names if item not in recompute), recompute=tuple(recompute))


def attention_of(model: ModelFacts | None) -> Section:
    """What fills the attention half of every layer."""
    return DENSE["attention"] if model is None else model.halves["attention"]


@st.composite
def checkpointed(draw: st.DrawFn, rule: Rule, parallel: ParallelFacts, model: ModelFacts | None = None) -> Rule:
    """The same rule, or one whose layers, or one half of them, keep their input alone. What layers communicate again may begin
    ahead, and what they gather before."""
    both = ["layer", "halves", CheckpointGroups(layers=2)]
    chosen = draw(st.sampled_from([None, None, *both, *HALVES]))
    if chosen is None:
        return rule
    attention, having = attention_of(model), [layer for layer in rule.layers if model is not None and model.has_experts(layer)]
    left = {item for item in (*rule.keep, *rule.recompute) if chosen in HALVES and (item in attention.names) == (chosen == "mlp")}
    keep, recompute = (tuple(item for item in items if item in left) for items in (rule.keep, rule.recompute))
    exchanges = parallel.expert > 1 and len(having) == len(rule.layers) and chosen in ("layer", "mlp")
    reduces = parallel.tensor > 1 and chosen == "layer" and not having
    gathers = parallel.sequence_parallel and not attention.two_paths and (model is None or gathers_once(model.fp8))
    ahead = draw(st.sampled_from([False, True, *(["gather"] if reduces and gathers else [])])) if exchanges or reduces else False
    return Rule(layers=rule.layers, checkpoint=chosen, ahead=ahead, keep=keep, recompute=recompute)


def _beginning_nothing(stage: Stage) -> Stage:
    return stage.model_copy(update={"rules": tuple(rule.model_copy(update={"ahead": False}) for rule in stage.rules)})


@st.composite
def with_windows(
    draw: st.DrawFn,
    stage: Stage,
    index: int,
    half: Half,
    last: bool,
    parallel: ParallelFacts,
    te: bool,
    model: ModelFacts | None = None,
) -> Stage:
    """The stage with a window for one half and a place for its gather, out of those that come in time for every layer.

    `last`: whether it is the last virtual stage, which receives no gradient.
    """

    def in_time(windows: str, gather: str | None) -> bool:
        names = [gather or ON_DEMAND, *(stretch.window for stretch in stretches_in(windows))]
        if any(_in_experts(name, stage.rules[index].layers, experts, parallel) for name in names):
            return False
        changed = _with(stage, index, half, windows, gather)
        try:
            Rule.model_validate(changed.rules[index].model_dump())
        except ValidationError:
            return False
        return not _problems(changed, parallel, 2 * len(stage.layers), te, model)

    experts = () if model is None else model.moe_layers
    gather: str | None = None
    if stage.rules[index].gather.of(half) is not None:
        gather = draw(st.sampled_from([name for name in [ON_DEMAND, *_backward(parallel, model)] if in_time(ON_DEMAND, name)]))
    named = [ON_DEMAND, *([] if last else [RECV_BACKWARD]), *_backward(parallel, model)]
    windows = [name for name in named if in_time(name, gather)]
    drawn_place = draw(places(stage.rules[index].filling(half), windows))
    return _with(stage, index, half, drawn_place if in_time(drawn_place, gather) else draw(st.sampled_from(windows)), gather)


@st.composite
def places(draw: st.DrawFn, section: Section, windows: Sequence[str]) -> str:
    """One of these windows, or a few stretches in some of them; not all of these are in time, or in order."""
    if not section.stops or draw(st.booleans()):
        return draw(st.sampled_from(windows))
    stops = sorted(draw(st.sets(st.sampled_from(section.stops), min_size=1)), key=section.index)
    some = (
        draw(st.lists(st.sampled_from(windows), min_size=len(stops) + 1, max_size=len(stops) + 1, unique_by=_moment))
        if len(set(map(_moment, windows))) > len(stops)
        else [draw(st.sampled_from(windows))]
    )
    *begun, last = sorted(some, key=_moment)
    return in_words((*(Stretch(window, stop) for window, stop in zip(begun, stops, strict=False)), Stretch(last)))


def _moment(window: str) -> tuple[int, ...]:
    """Windows are sorted by when they come."""
    at = window_at(window, 0)
    if not isinstance(at, WindowAddress):
        return (2 if at == ON_DEMAND else 0, 0)
    return 1, 0, -at.layer, -HALVES.index(at.half), at.ordinal


def _backward(parallel: ParallelFacts, model: ModelFacts | None) -> list[str]:
    return [f"{name}{above}" for above in ("", "+1") for name in _collectives("bwd", parallel, model)]


def _collectives(passing: Pass, parallel: ParallelFacts, model: ModelFacts | None) -> list[str]:
    """Those of a layer, by their names; without tensor parallelism the exchanges of experts."""
    if parallel.tensor == 1:
        return [f"{passing}.mlp.{n}" for n in range(len(EXPERTS.exchanges_of[passing]))] if parallel.expert > 1 else []
    sections = {**DENSE, "attention": attention_of(model)}
    return [
        f"{passing}.{half}.{n}"
        for half, section in sections.items()
        for n in range(len(section.collectives(passing, parallel.sequence_parallel)))
    ]


DEVICE = PlannedDevice(memory_bytes=80, budget_bytes=74, reserve_bytes={"context": 1, "nccl": 4, "allocator": 1})
HELD = {"always": {"parameters": 2, "gradients": 4}, "loss": {"logits": 6}}


@st.composite
def _with_experts(draw: st.DrawFn, rule: Rule, model: ModelFacts | None) -> Rule:
    """Where all of the rule's layers have experts, some of their items are recomputed; else their MLP half is kept."""
    having = [layer for layer in rule.layers if model is not None and model.has_experts(layer)]
    if not having or model is None:
        return rule
    attention = attention_of(model).names
    recompute = tuple(item for item in rule.recompute if item in attention)
    if len(having) < len(rule.layers) or draw(st.booleans()):
        names = (*attention, *DENSE["mlp"].names)
        return Rule(layers=rule.layers, keep=tuple(item for item in names if item not in recompute), recompute=recompute)
    sections = model.sections_of(having[0])
    recompute += tuple(draw(st.lists(st.sampled_from(sections[1].recomputable), unique=True)))
    names = [name for section in sections for name in section.names]
    return Rule(layers=rule.layers, keep=tuple(item for item in names if item not in recompute), recompute=recompute)


def _in_experts(name: str, layers: LayerRange, experts: Sequence[LayerRange], parallel: ParallelFacts) -> bool:
    """Whether a window lies in experts, for some of these layers, and is none there."""
    if parallel.expert > 1:
        return False
    windows = [window_at(name, layer) for layer in layers]
    return any(
        isinstance(window, WindowAddress) and window.half == "mlp" and window.layer in span
        for window in windows
        for span in experts
    )


def _on_demand(rule: Rule, parallel: ParallelFacts) -> Rule:
    """Gather on demand whatever must be gathered."""
    needed = {half: ON_DEMAND for half in HALVES if parallel.sequence_parallel and rule.filling(half).gathered in rule.recompute}
    return rule.model_copy(update={"gather": Gather(**needed)})


def _with(stage: Stage, index: int, half: Half, windows: str, gather: str | None) -> Stage:
    rule, rules = stage.rules[index], list(stage.rules)
    changes = {
        "windows": rule.windows.model_copy(update={half: windows}),
        "gather": rule.gather.model_copy(update={half: gather}),
    }
    rules[index] = rule.model_copy(update=changes)
    return stage.model_copy(update={"rules": tuple(rules)})


def _problems(stage: Stage, parallel: ParallelFacts, depth: int, te: bool, model: ModelFacts | None) -> list[str]:
    having = [layer for layer in stage.layers if model is not None and model.has_experts(layer)]
    halves = planned_halves(stage, lambda layer: DENSE.values() if model is None else model.sections_of(layer))
    layout = Layout(parallel.tensor > 1, parallel.sequence_parallel, having if parallel.expert > 1 else ())
    found = list(order_problems(stage.model_copy(update={"ahead_depth": depth}), Timetable([tuple(halves)], layout), 0, te=te))
    ahead = any(rule.windows.of(half) != ON_DEMAND for rule in stage.rules for half in HALVES)
    return found + (["ahead of time without depth"] if ahead and depth == 0 else [])
