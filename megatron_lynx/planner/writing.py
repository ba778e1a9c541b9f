"""Writes the solver's answers as a plan.

StageAnswer of each stage ──> an entry for each chunk: rules, windows, depth, offloaded bytes, predictions ──> Plan
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Literal

from megatron_lynx.anatomy import HALVES, Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.config.job import Job
from megatron_lynx.cost.memory import smallest_offloaded_bytes
from megatron_lynx.cost.moments import Moment, StageMemory
from megatron_lynx.cost.step import avoid_messages
from megatron_lynx.cost.update import update_s
from megatron_lynx.plan.consistency import depth
from megatron_lynx.plan.facts import IN_BF16, BatchFacts, LayerRange, ModelFacts, ParallelFacts, PlannedDevice, Provenance
from megatron_lynx.plan.plan import ALWAYS, Head, Offload, Plan, Predicted, Stage, Whole
from megatron_lynx.plan.rule import Ahead, CheckpointName, Rule, joined
from megatron_lynx.plan.timetables import planned_halves
from megatron_lynx.planner.evaluation import held_by_moment
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.solver.answer import StageAnswer
from megatron_lynx.solver.problem import Option
from megatron_lynx.timetable import Layout, Timetable
from megatron_lynx.units import SECOND_DIGITS
from megatron_lynx.version import __version__

Layer = tuple[Option, Option]


def written(job: Job, answers: Sequence[StageAnswer]) -> Plan:
    """Return the plan of these answers. `job`: with its layers."""
    return plan_of(job, lambda where: _entry(job, answers[where[0]], where))


def with_rehearsed(plan: Plan, parted: Job, profile: Profile, simulation: Simulation) -> Plan:
    loads = {load.stage: load for load in simulation.host_bound}
    added_s = update_s(parted, profile)
    held_of = {stage: held_by_moment(parted, simulation, stage) for stage in range(parted.parallel.pipeline)}
    stages = []
    for entry in plan.stages:
        total, held = partial(simulation.total, entry.stage, chunk=entry.chunk), held_of[entry.stage]
        seconds = {"step_s": simulation.step_s, "update_s": added_s, "exposed_copy_s": simulation.exposed_copy_s(entry.stage)}
        if (load := loads.get(entry.stage)) is not None:
            seconds |= {"host_s": load.host_s, "device_s": load.device_s}
        if parted.chunks > 1:  # hidden seconds of a receive differ by backward, and the solver assumes the least
            seconds |= {"hidden_recompute_s": total("hidden_s"), "exposed_recompute_s": total("exposed_s")}
        if entry.defers:
            seconds |= {"weight_gradient_hidden_s": total("filled_s"), "weight_gradient_exposed_s": total("unfilled_s")}
        predictions: dict[str, object] = {name: round(value, SECOND_DIGITS) for name, value in seconds.items()}
        predictions["memory_bytes"] = max(memory.total for memory in held.values())
        predictions["memory"] = _by_moment(held) if entry.chunk == 0 else {}
        stages.append(entry.model_copy(update={"predicted": entry.predicted.model_copy(update=predictions)}))
    return plan.model_copy(update={"stages": tuple(stages)})


def _by_moment(held: Mapping[Moment, StageMemory]) -> dict[str, dict[str, int]]:
    """Bytes by moment and kind, without zeros; kinds equal at all moments are stated once."""
    kinds = {moment: {kind: size for kind, size in memory.kinds.items() if size} for moment, memory in held.items()}
    always = {name: size for name, size in kinds["update"].items() if all(sizes.get(name) == size for sizes in kinds.values())}
    beside: dict[str, dict[str, int]] = {}
    beside |= {moment: {name: size for name, size in sizes.items() if name not in always} for moment, sizes in kinds.items()}
    return {ALWAYS: always, **beside}


def model_facts(job: Job) -> ModelFacts:
    model = job.model
    facts = {name: getattr(model, name) for name in ModelFacts.model_fields if hasattr(model, name)}
    facts |= {"fp8": model.fp8_recipe, "latent_attention": model.latent}
    facts |= {name: len(getattr(model, name)) for name in IN_BF16}
    return ModelFacts(**facts)


def plan_of(job: Job, entry_of: Callable[[tuple[int, int]], Stage]) -> Plan:
    """Return the plan with these entries, by stage and chunk."""
    stages = tuple(entry_of((stage, chunk)) for chunk in range(job.chunks) for stage in range(job.parallel.pipeline))
    checkpoints = any(rule.checkpoint is not None for entry in stages for rule in entry.rules)
    model = model_facts(job).model_copy(update={"fp8_copies_kept": not (checkpoints and job.model.facts.copies_go)})
    provenance = Provenance(made_by=f"megatron-lynx {__version__}", job=job.digest)
    return Plan(**contents_of(job) | {"model": model}, stages=stages, device=planned_device(job), provenance=provenance)


def contents_of(job: Job) -> dict[str, Any]:
    parallel = ParallelFacts(
        tensor=job.parallel.tensor,
        pipeline=job.parallel.pipeline,
        chunks=job.chunks,
        microbatch_group=job.parallel.microbatch_group if job.chunks > 1 else None,
        sequence_parallel=job.parallel.sequence_parallel,
        expert=job.parallel.expert if exchanging_layers(job) else 1,
        context=job.parallel.context,
        userbuffers=job.userbuffers,
    )
    return {
        "version": 1,
        "model": model_facts(job),
        "parallel": parallel,
        "batch": BatchFacts(micro=job.batch.micro, microbatches=job.microbatches),
        "schedule": job.schedule,
        "defer_updates": job.defer_updates,
        "head": Head(pieces=job.head_pieces) if job.head_pieces > 1 else None,
    }


def planned_device(job: Job) -> PlannedDevice | None:
    """Memory, budget and reserve of a job's GPUs; None on CPU."""
    if job.cluster.device != "cuda":
        return None
    reserve = job.device_reserve
    return PlannedDevice(
        memory_bytes=reserve.memory_bytes,
        budget_bytes=job.memory_budget_bytes,
        reserve_bytes={**reserve.taken_bytes, **reserve.parts},
        optimizer_offload=job.optimizer.offloaded,
    )


def stage_of(
    job: Job,
    where: tuple[int, int],
    rules: Sequence[Rule],
    predicted: Predicted,
    offload: Offload | None = None,
    whole: Whole | None = None,
) -> Stage:
    """Return one entry of a plan, with the ahead depth that its windows need. `where`: stage and chunk."""
    layers, (stage, chunk) = job.layers_of(*where), where
    windows = (rule.windows.of(half) for rule in rules for half in HALVES)
    entry = Stage(
        stage=stage,
        chunk=chunk,
        layers=LayerRange.of(layers),
        ahead_depth=int(any(window != ON_DEMAND for window in windows)),
        rules=joined(rules),
        offload=offload,
        whole=whole,
        predicted=predicted,
    )
    layout = Layout(job.parallel.tensor > 1, job.parallel.sequence_parallel, exchanging_layers(job))
    deepest = depth(Timetable([tuple(planned_halves(entry, job.model.sections))], layout))
    return entry.model_copy(update={"ahead_depth": max(entry.ahead_depth, deepest)})


def exchanging_layers(job: Job) -> frozenset[int]:
    """Layers whose exchanges of tokens are windows: experts spread over ranks, and not opaque."""
    experts = job.model.experts
    section = job.model.kind_sections(experts=True)[1]
    windows = experts is not None and not experts.whole and section.exchanges_in_windows
    return job.model.expert_layers if windows and job.parallel.expert > 1 else frozenset()


def rule_of(
    layers: int | LayerRange,
    sections: Iterable[Section],
    recompute: Collection[str],
    windows: Mapping[Half, str | None],
    gathers: Mapping[Half, str | None],
    checkpoint: CheckpointName | None = None,
    *,
    ahead: Ahead = False,
) -> Rule:
    """Return the rule for one or more layers. `sections`: of halves that are not checkpointed. `ahead`: what checkpointed halves
    communicate ahead."""
    items = [item for section in sections for item in section.names]
    content = {
        "layers": layers,
        "checkpoint": checkpoint,
        "ahead": ahead,
        "keep": tuple(item for item in items if item not in recompute),
        "recompute": tuple(item for item in items if item in recompute),
        "windows": dict(windows),
        "gather": dict(gathers),
    }
    return Rule.model_validate(content)


def _entry(job: Job, answer: StageAnswer, where: tuple[int, int]) -> Stage:
    solved = answer.chunks[where[1]]
    whole = Whole(of_every=answer.in_flight, first=answer.whole) if 0 < answer.whole < answer.in_flight else None
    recomputing = sum(whole is None or number not in whole for number in range(job.microbatches))
    predicted = Predicted(
        hidden_recompute_s=round(solved.hidden_s * recomputing, SECOND_DIGITS),
        exposed_recompute_s=round(solved.exposed_s * recomputing, SECOND_DIGITS),
        resident_activation_bytes=solved.resident_bytes,
        ahead_bytes=solved.ahead_bytes,
        recomputed_flops=solved.flops,
        host_bytes=answer.host_bytes,
    )
    rules = [*_rules(job, where, solved.layers)]
    if len(rules) > 1 and len(rules[-1].layers) == 1:  # nothing begins ahead of the last layer, whatever its rule says
        as_below = rules[-1].model_copy(update={"ahead": rules[-2].ahead})
        rules[-1] = as_below if as_below.treatment == rules[-2].treatment else rules[-1]
    return stage_of(job, where, rules, predicted, _offload(job, answer, where[1]), whole)


def _rules(job: Job, where: tuple[int, int], choices: Sequence[Layer]) -> Iterator[Rule]:
    """Yield a rule for each run of equally treated layers, and for each group that keeps one input."""
    numbered, begins = list(zip(job.layers_of(*where), choices, strict=True)), dict[int, int]()
    for layer, choice in numbered:
        begins[layer] = begins[layer - 1] if choice[0].fed else layer

    def treatment(numbered_layer: tuple[int, Layer]) -> object:
        layer, choice = numbered_layer
        grouped = choice[0].fed or choice[1].feeds
        return begins[layer] if grouped else (choice, job.model.sections(layer))

    for _, treated in groupby(numbered, key=treatment):
        (first, choice), *layers_above = treated
        layers = LayerRange(first=first, last=first + len(layers_above))
        if choice[1].feeds:
            window = layers_above[-1][1][1].window  # the rest of the group's last half may run in a wait, if all layers have it
            alike = len({job.model.sections(layer) for layer in layers}) == 1
            windows = {HALVES[1]: window} if window and alike else {}
            yield Rule.model_validate({"layers": layers, "checkpoint": {"layers": len(layers)}, "windows": windows})
        else:
            yield _rule(layers, job.model.sections(first), choice)


def _offload(job: Job, answer: StageAnswer, chunk: int) -> Offload | None:
    size_bytes = answer.offloaded_bytes(chunk)
    if not size_bytes:
        return None
    smallest_bytes = smallest_offloaded_bytes(LayerShape.of(job).input_bytes)
    beside: Literal["avoid", "allow"] = "avoid" if avoid_messages(job) else "allow"
    experts = not job.model.experts_whole and any(second.exchanges for _, second in job.kinds_of(answer.stage, chunk))
    return Offload(
        bytes=size_bytes,
        smallest_tensor_bytes=smallest_bytes,
        beside_messages=beside,
        experts=experts,
        pace_bytes=answer.leaving[chunk].pace_bytes if answer.leaving else None,
        half_by_half="all" if answer.leaving and answer.in_flight > 1 else "at_once",
    )


def _rule(layers: LayerRange, sections: Sequence[Section], choice: Layer) -> Rule:
    both = dict(zip(HALVES, choice, strict=True))
    plain = {half: option for half, option in both.items() if option.checkpoint is None}
    checkpoints = {half: option.checkpoint for half, option in both.items() if option.checkpoint is not None}
    recompute = {item for option in plain.values() for item in option.recompute}
    windows = {half: option.window for half, option in both.items() if option.window is not None}
    windows = {half: ON_DEMAND for half, option in plain.items() if option.recompute} | windows
    gathers = {half: option.gather for half, option in plain.items()}
    named = [section for section in sections if section.half in plain]
    unit: CheckpointName | None = next(iter(checkpoints), None)
    if len(checkpoints) == len(HALVES):
        unit = "layer" if choice[0].joined else "halves"
    gathered = any(one.gathers_ahead for one in checkpoints.values())
    ahead: Ahead = "gather" if gathered else any(option.begins_ahead for option in choice)
    return rule_of(layers, named, recompute, windows, gathers, unit, ahead=ahead)
