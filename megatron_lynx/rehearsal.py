"""A plan without ranks: its schedule, its costs from a profile, and the simulated step.

plan ──one_f_one_b, interleaved──> order of every stage ─┐
  └──rules, profile──> treated halves, host copies ──────┴──simulate──> Simulation
                                                         └──simulate_without_flushes──> a run, and a batch of its steady state
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_lynx.anatomy import Section
from megatron_lynx.anatomy.address import BACKWARD_PHASES, BackwardPhase, FrameKey, WindowAddress, window_at
from megatron_lynx.config.experts import as_spans
from megatron_lynx.cost.communication import embedding_of, head_of
from megatron_lynx.cost.memory import movable_bytes
from megatron_lynx.cost.prices import Prices
from megatron_lynx.cost.replay import replay_of
from megatron_lynx.errors import PlanMismatch, Problem
from megatron_lynx.pace import Pace
from megatron_lynx.plan import order
from megatron_lynx.plan.plan import Plan, Rule, Stage
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.schedule.action import with_replays
from megatron_lynx.schedule.interleaved import interleaved
from megatron_lynx.schedule.one_f_one_b import one_f_one_b
from megatron_lynx.schedule.schedule import Schedule
from megatron_lynx.simulator.copies import HostCopy
from megatron_lynx.simulator.double_buffered import simulate_without_flushes
from megatron_lynx.simulator.halves import stage_passes
from megatron_lynx.simulator.passes import ChunkPasses
from megatron_lynx.simulator.simulate import simulate
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.simulator.treated import Deferral, Leaving, Seating, Treated


def rehearse(plan: Plan, profile: Profile, update_s: float = 0.0, *, reduced_in_backward: bool = False) -> Simulation:
    """Simulates one step under a plan, with the seconds and bytes of a profile; without the optimizer.

    `reduced_in_backward`: with --overlap-grad-reduce (`Overlap.gradients`), where the last backward of a step defers nothing.
    Without flushes a whole run, with updates of `update_s` seconds, of which a step is one batch in the steady state.
    Raises `PlanMismatch` with every fact in which the profile is of something else than the plan.
    """
    check_shapes(plan, profile)
    prices = Prices(profile)
    chunks = [
        _passes_of_chunks(plan, plan.chunks_of(stage), prices, reduced_in_backward=reduced_in_backward)
        for stage in range(plan.parallel.pipeline)
    ]
    p2p_s = profile.link_s("p2p", profile.attention.input_bytes)
    if plan.schedule == "double_buffered":
        return simulate_without_flushes(
            plan.batch.microbatches,
            [passes for (passes,) in chunks],
            p2p_s,
            profile.interference,
            updates="deferred" if plan.defer_updates else "at once",
            update_s=update_s,
        )
    between = profile.messages_between_passes
    return simulate(schedule_of(plan), chunks, p2p_s, profile.interference, between_passes=between)


def schedule_of(plan: Plan) -> Schedule:
    """Megatron's schedule for the plan's layout, every backward after the replays that its receive hides."""
    layout, microbatches = plan.parallel, plan.batch.microbatches
    if layout.chunks == 1:
        stock = one_f_one_b(layout.pipeline, microbatches)
    else:
        stock = interleaved(layout.pipeline, microbatches, layout.chunks, layout.group)
    return replace(stock, orders=tuple(tuple(with_replays(actions)) for actions in stock.orders))


def stage_passes_of(plan: Plan, stage: Stage, profile: Profile, *, reduced_in_backward: bool = False) -> ChunkPasses:
    """What one micro-batch costs on one stage, or on one chunk of it. `reduced_in_backward`: as in `rehearse`."""
    entries, prices = plan.chunks_of(stage.stage), Prices(profile)
    return _passes_of_chunks(plan, entries, prices, reduced_in_backward=reduced_in_backward)[entries.index(stage)]


def _passes_of_chunks(
    plan: Plan, entries: Sequence[Stage], prices: Prices, *, reduced_in_backward: bool = False
) -> list[ChunkPasses]:
    """What one micro-batch costs on each chunk of one stage."""
    halves = {entry.chunk: tuple(treated_halves(plan, entry, prices)) for entry in entries}
    return [_chunk_passes(plan, entry, prices, halves, reduced_in_backward=reduced_in_backward) for entry in entries]


def _chunk_passes(
    plan: Plan, entry: Stage, prices: Prices, halves: Mapping[int, tuple[Treated, ...]], *, reduced_in_backward: bool
) -> ChunkPasses:
    """`halves`: of all chunks of the stage, by chunk."""
    own, others = halves[entry.chunk], {chunk: each for chunk, each in halves.items() if chunk != entry.chunk}
    passes = _passes(plan, entry, prices, own, others, reduced_in_backward=reduced_in_backward)
    passes = replace(passes, copy=_copy(plan, entry, prices.profile))
    if entry.offload is not None and entry.offload.pace_bytes is not None:
        leaving = tuple(_half_by_half(plan, entry, prices, own))
        passes = replace(passes, at_once=_passes(plan, entry, prices, leaving, others, reduced_in_backward=reduced_in_backward))
    if entry.whole is None:
        return passes
    kept = tuple(treated_halves(plan, _keeping(entry, plan.model.halves.values()), prices))
    return replace(passes, whole=entry.whole, keeping=_passes(plan, entry, prices, kept, others | {entry.chunk: own}))


def _passes(
    plan: Plan,
    stage: Stage,
    prices: Prices,
    own: tuple[Treated, ...],
    others: Mapping[int, tuple[Treated, ...]],
    *,
    reduced_in_backward: bool = False,
) -> ChunkPasses:
    profile, message_bytes = prices.profile, prices.message_bytes
    place = stage.stage, stage.chunk
    first, last = place == (0, 0), place == (plan.parallel.pipeline - 1, plan.parallel.chunks - 1)
    return stage_passes(
        own,
        profile,
        message_bytes,
        embedding=embedding_of(profile, message_bytes) if first else None,
        head=head_of(profile, message_bytes, 1 if plan.head is None else plan.head.pieces) if last else None,
        others=others,
        deferral=(stage.chunk, 0 if stage.weight_gradients is None else stage.weight_gradients.bytes),
        reduced_in_backward=reduced_in_backward,
    )


def _keeping(stage: Stage, sections: Iterable[Section]) -> Stage:
    """The same stage with nothing replayed, as a micro-batch that is kept whole passes it."""
    items = [item for section in sections for item in section.names]  # of other sections what it does not name is kept
    rule = Rule.model_validate({"layers": stage.layers, "keep": items})
    return stage.model_copy(update={"rules": (rule,)})


def _copy(plan: Plan, stage: Stage, profile: Profile) -> HostCopy | None:
    """What is offloaded of a micro-batch: no more than can be. A profile that knows no link to the host gives copies no time."""
    if stage.offload is None:
        return None
    size_bytes = min(stage.offload.bytes, _movable_bytes(plan, stage, profile, stage.offload.smallest_tensor_bytes))
    seconds = profile.link_s("host", size_bytes)
    return HostCopy(seconds, seconds, size_bytes, stage.offload.beside_messages == "avoid")


def _movable_bytes(plan: Plan, stage: Stage, profile: Profile, smallest_bytes: int) -> int:
    """How much of one micro-batch can go to the host."""
    movable, received_bytes = sum(_movable_of_halves(plan, stage, profile, smallest_bytes)), profile.attention.input_bytes
    kept = (stage.stage, stage.chunk) == (0, 0) and received_bytes >= smallest_bytes
    return movable + received_bytes if kept else movable


def _movable_of_halves(plan: Plan, stage: Stage, profile: Profile, smallest_bytes: int) -> Iterator[int]:
    """How much of each half can go to the host, in forward order: not what the chunk was given, which Megatron holds until its
    forward is over, and what experts keep only where the plan says so."""
    received_bytes = profile.attention.input_bytes
    received = received_bytes >= smallest_bytes
    for number, (layer, section) in enumerate(_sections(plan, stage)):
        if section.in_some_layers and (stage.offload is None or not stage.offload.experts):
            yield 0
            continue
        costs = profile.of(section)
        replay = replay_of(section, costs.tensors, stage.rule_for(layer).replays(section.half))
        yield movable_bytes(costs, replay, smallest_bytes) - (received_bytes if received and number == 0 else 0)


def _half_by_half(plan: Plan, stage: Stage, prices: Prices, treated: Sequence[Treated]) -> Iterator[Treated]:
    """The halves of a stage as they are where a micro-batch's own backward follows at once: what leaves of each, and when."""
    assert stage.offload is not None
    assert stage.offload.pace_bytes is not None
    movable = _movable_of_halves(plan, stage, prices.profile, stage.offload.smallest_tensor_bytes)
    pace, left_bytes = Pace(stage.offload.pace_bytes, len(treated)), stage.offload.bytes
    for place, (half, most_bytes) in enumerate(zip(treated, movable, strict=True), start=1):
        size_bytes = 0 if pace.stays(place) else min(left_bytes, most_bytes)
        if size_bytes <= 0:
            replay = stage.rule_for(half.layer).replays(half.half)
            yield replace(half, host=prices.host(half.section, replay, offloads=False, deferred=len(half.deferred)))
            continue
        left_bytes -= size_bytes
        turns = pace.leaves(place, size_bytes, order.halves_ahead(stage, (half.layer, half.half)))
        yield replace(half, leaving=Leaving(size_bytes, prices.profile.link_s("host", size_bytes), turns))


def check_shapes(plan: Plan, profile: Profile) -> None:
    """Raises `PlanMismatch` for every fact in which plan and profile differ."""
    facts = plan.model.model_dump() | plan.parallel.model_dump() | plan.batch.model_dump()
    facts["latent"] = facts.pop("latent_attention")
    found = {name: value for name, value in profile.shape.model_dump().items() if name in facts}
    if (experts := profile.shape.experts) is not None:
        found |= {"moe_load": experts.load, "shared_experts": experts.shared_ffn > 0}
    problems = [
        Problem(f"profile: shape.{name}", str(value), f"{facts[name]}, as in the plan", "measure the plan's job")
        for name, value in found.items()
        if value != facts[name] and (name, facts[name]) != ("expert", 1)  # without exchanges that are windows it says nothing
    ]
    layers = range(1, plan.model.layers + 1)
    needed = {layer for layer in layers if plan.model.has_experts(layer)}
    having = set() if profile.shape.experts is None else profile.shape.experts.numbers(plan.model.layers)
    if having != needed:
        said, wanted = (", ".join(map(str, as_spans(numbers))) or "none" for numbers in (having, needed))
        problems.append(Problem("profile: layers with experts", said, f"{wanted}, as in the plan", "take the plan's job"))
    if problems:
        raise PlanMismatch("the profile was measured for another job than the plan's", problems)


def _sections(plan: Plan, stage: Stage) -> Iterator[tuple[int, Section]]:
    """What fills the halves of a stage, with their layers, in forward order."""
    return ((layer, section) for layer in stage.layers for section in plan.model.sections_of(layer))


def treated_halves(plan: Plan, stage: Stage, prices: Prices) -> Iterator[Treated]:
    """The halves of a stage in forward order, each as the plan's rules have it."""
    offloads = stage.offload is not None
    for layer, section in _sections(plan, stage):
        frame = layer, section.half
        rule = stage.rule_for(layer)
        replay = rule.replays(section.half)
        price = prices.of(section, replay)
        deferred = _deferred(prices, rule, layer, section) if rule.weight_gradients else {}
        steady, cooldown = _seatings(stage, rule, frame, section, prices)
        yield Treated(
            layer,
            section,
            price.memory,
            replay_s=price.replay_s,
            steady=steady,
            cooldown=cooldown,
            stops=price.stops,
            host=prices.host(section, replay, offloads=offloads, deferred=len(deferred)),
            deferred=deferred,
        )


def _deferred(prices: Prices, rule: Rule, layer: int, section: Section) -> dict[str, Deferral]:
    """The linears of a half whose weight gradients are deferred, in the order in which backward reaches them."""
    return {
        linear: Deferral(
            prices.weight_gradient(section, linear),
            tuple(window_at(wait, layer) for wait in rule.weight_gradients[linear]),
        )
        for linear in reversed(section.linears)
        if linear in rule.weight_gradients
    }


def _seatings(stage: Stage, rule: Rule, frame: FrameKey, section: Section, prices: Prices) -> tuple[Seating, Seating]:
    """Where a half is replayed in the steady phase and in cool-down, which is mostly the same."""
    steady, cooldown = ((rule.windows.of(frame[1], phase), rule.gather.of(frame[1], phase)) for phase in BACKWARD_PHASES)
    first = _seating(stage, frame, section, "steady", prices)
    return first, first if steady == cooldown else _seating(stage, frame, section, "cooldown", prices)


def _seating(stage: Stage, frame: FrameKey, section: Section, phase: BackwardPhase, prices: Prices) -> Seating:
    gather = order.gather_of(stage, frame, phase)
    if gather is None:
        return Seating(order.stretches_of(stage, frame, phase))
    behind = prices.profile.shape.halves[gather.half] if isinstance(gather, WindowAddress) else None
    whole = behind is not None and behind.half == section.half
    return Seating(order.stretches_of(stage, frame, phase), gather, *prices.gathered_s(section, behind, whole=whole))
