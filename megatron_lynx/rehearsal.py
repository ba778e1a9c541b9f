"""Simulates a plan without ranks: its schedule, its costs from a profile, and the step.

plan ──schedule.flushes──> order of every stage          ─┐
  └──rules, profile──> treated halves, host copies ──────┴──simulate──> Simulation
                                                         └──simulate_without_flushes──> a run, and a batch of its steady state
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from megatron_lynx.anatomy.address import ON_DEMAND, Window, WindowAddress
from megatron_lynx.config.experts import as_spans
from megatron_lynx.config.job import Job
from megatron_lynx.cost.combined import keeping_all, nodes_of, shared_rates
from megatron_lynx.cost.communication import gather_lost_and_spared_s
from megatron_lynx.cost.ends import ends_of
from megatron_lynx.cost.host import half_host_s
from megatron_lynx.cost.memory import movable_bytes
from megatron_lynx.cost.moments import less_in_hand_bytes
from megatron_lynx.cost.recompute import Checkpoint, recomputation_of
from megatron_lynx.cost.section import Prices
from megatron_lynx.errors import PlanMismatch, Problem
from megatron_lynx.pace import Pace
from megatron_lynx.plan.plan import Offload, Plan, Stage
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.profiler.profile import BlockProfile, Profile
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.simulator.double_buffered import simulate_without_flushes
from megatron_lynx.simulator.halves import stage_passes
from megatron_lynx.simulator.passes import ChunkPasses, HostCopy
from megatron_lynx.simulator.simulate import simulate
from megatron_lynx.simulator.simulation import PairedChunk, Simulation, in_steady_state, most_beside, paired
from megatron_lynx.simulator.walk import Halves, Leaving, Treated
from megatron_lynx.timeline import Passes
from megatron_lynx.timetable import PlannedHalf, Timetable


def rehearse(
    plan: Plan,
    profile: Profile,
    *,
    job: Job | None = None,
    loaded: Mapping[int, Profile] = MappingProxyType({}),
    whole: bool = False,
    prices: Prices | None = None,
) -> Simulation:
    """Simulate one step under a plan, with the seconds and bytes of a profile; without the optimizer.

    `job`: the plan's. Without it the transient memory (`cost.moments`) of all halves counts as equal, and gradients are reduced
    after the last backward of a step; with --overlap-grad-reduce (`Overlap.gradients`) that backward delays nothing.
    `loaded`: profiles of stages whose experts have another load than the plan's. `whole`: all micro-batches are simulated, not a
    few from which the others follow. `prices`: of this job and profile, if some are known. Without flushes a whole run is
    simulated, and a step is one batch of its steady state.

    Raises `PlanMismatch` with every difference between profile and plan.
    """
    check_shapes(plan, profile)
    less_in_hand = {} if job is None else less_in_hand_bytes(job)
    usual = Prices(profile, less_in_hand) if prices is None else prices
    of_stages = [Prices(loaded[stage], less_in_hand) if stage in loaded else usual for stage in range(plan.parallel.pipeline)]
    chunks = [
        passes_of_chunks(plan, plan.chunks_of(stage), stage_prices, reduced_in_backward=_reduces_in_backward(job, stage))
        for stage, stage_prices in enumerate(of_stages)
    ]
    if plan.schedule == "double_buffered":
        return simulate_without_flushes(
            plan.batch.microbatches,
            [passes for (passes,) in chunks],
            profile.link_s("p2p", profile.attention.input_bytes),
            profile.interference,
            deferred=plan.defer_updates,
        )
    simulated = partial(_simulated, plan, profile, whole=whole)
    apart = simulated(chunks)
    if not plan.model.moe_overlapped:
        return apart
    beside = shared_rates(profile, 1.0 if job is None else job.fused_dispatch.computing_kept)
    pairs = [
        paired(list(_in_nodes(plan, stage, passes, of_stages[stage])), beside, delayed=plan.model.moe_delayed)
        for stage, passes in enumerate(chunks)
    ]
    together = simulated(pairs, more=1)
    layers_bytes = (_most_of_a_layer(plan, stage, stage_prices.profile) for stage, stage_prices in enumerate(of_stages))
    more_bytes = tuple(map(most_beside, chunks, layers_bytes))
    return replace(together, apart=apart, more_bytes=more_bytes)


def _reduces_in_backward(job: Job | None, stage: int) -> bool:
    """Whether a stage reduces gradients during the last micro-batch's backward, as `apply.live_run` finds it."""
    if job is None or not job.overlap.gradients:
        return False
    return not job.overlap.aligned or job.parallel.pipeline == 1 or (stage == 0 and job.chunks == 1)


def _simulated(
    plan: Plan, profile: Profile, chunks: Sequence[Sequence[ChunkPasses]], more: int = 0, *, whole: bool
) -> Simulation:
    """Simulate a step that flushes. `more`: additional warm-up forwards."""
    layout, microbatches = plan.parallel, plan.batch.microbatches
    p2p_s, between = profile.link_s("p2p", profile.attention.input_bytes), profile.messages_between_passes

    def simulated(few: int) -> Simulation:
        schedule = with_flushes(layout.pipeline, few, layout.chunks, layout.group, more)
        return simulate(schedule, chunks, p2p_s, profile.interference, between_passes=between)

    if whole or any(entry.whole is not None for entry in plan.stages):  # not all micro-batches are alike
        return simulated(microbatches)
    return in_steady_state(max(layout.pipeline, layout.group), microbatches, simulated)


def _most_of_a_layer(plan: Plan, stage: int, profile: Profile) -> int:
    """Without recomputation."""
    kinds = {plan.model.sections_of(layer) for entry in plan.chunks_of(stage) for layer in entry.layers}
    halves = [[profile.of(section) for section in kind] for kind in kinds]
    return max(sum(half.input_bytes + sum(tensor.bytes for tensor in half.tensors) for half in layer) for layer in halves)


def _in_nodes(plan: Plan, stage: int, passes: Sequence[ChunkPasses], prices: Prices) -> Iterator[PairedChunk]:
    """The chunks of a stage, layer by layer, with recomputation in the nodes of their backward."""
    profile, timetable = prices.profile, timetable_of(plan, stage)
    for entry, chunk_passes in zip(plan.chunks_of(stage), passes, strict=True):
        halves = list(treated_halves(entry, timetable.chunks[entry.chunk], prices))
        with_again, without = [], []
        for attention, mlp in zip(*[iter(halves)] * 2, strict=True):
            sections = attention.section, mlp.section
            plain = keeping_all(profile, sections)
            again = tuple(replace(costs, again_s=half.again_s) for costs, half in zip(plain, (attention, mlp), strict=True))
            with_again.append(nodes_of(profile, again, sections))
            without.append(nodes_of(profile, plain, sections))
        ends = _ends(plan, entry, prices)
        ends_s = sum(end.forward_s for end in ends), sum(end.backward_s for end in ends)
        again_s = sum(half.again_s for half in halves)
        copy = chunk_passes.copy if chunk_passes.at_once is not None else None
        copy_s = 0.0 if copy is None else copy.out_s / (1 - 1 / len(halves))  # the last half is not copied
        yield PairedChunk(chunk_passes, tuple(with_again), again_s, tuple(without), ends_s, copy_s)


def passes_of_chunks(
    plan: Plan, entries: Sequence[Stage], prices: Prices, *, reduced_in_backward: bool = False
) -> list[ChunkPasses]:
    timetable = timetable_of(plan, entries[0].stage)
    halves = {
        half.planned.key: half for entry in entries for half in treated_halves(entry, timetable.chunks[entry.chunk], prices)
    }
    return [_chunk_passes(plan, entry, prices, timetable, halves, reduced_in_backward=reduced_in_backward) for entry in entries]


def _chunk_passes(
    plan: Plan, entry: Stage, prices: Prices, timetable: Timetable, halves: Halves, *, reduced_in_backward: bool
) -> ChunkPasses:
    """`halves`: of all chunks of the stage."""
    deferral = entry.chunk, 0 if entry.weight_gradients is None else entry.weight_gradients.bytes
    made = partial(stage_passes, halves=halves, prices=prices, ends=_ends(plan, entry, prices), deferral=deferral)
    chunk_halves = [halves[planned.key] for planned in timetable.chunks[entry.chunk]]
    usual = partial(
        made,
        timetable,
        entry.chunk,
        reduced_in_backward=reduced_in_backward,
        read_after_send=entry.stage > 0 and plan.schedule == "flush",
    )
    passes, offload = usual(chunk_halves), entry.offload
    if offload is not None:
        movable = list(_movable_of_halves(plan, offload, prices.profile, chunk_halves))
        passes = replace(passes, copy=_copy(entry, offload, prices.profile, sum(movable)))
        if offload.pace_bytes is not None:
            within = usual(list(_half_by_half(offload, prices, chunk_halves, movable)))
            passes = within if offload.half_by_half == "all" else replace(passes, at_once=within)
    if entry.whole is None:
        return passes
    beside = timetable.beside_kept(entry.chunk)
    kept = list(treated_halves(entry, beside.chunks[-1], prices))
    return replace(passes, whole=entry.whole, keeping=made(beside, len(beside.chunks) - 1, kept))


def _ends(plan: Plan, stage: Stage, prices: Prices) -> tuple[BlockProfile, BlockProfile]:
    """Embedding and head of a stage's entry, without seconds if it has none."""
    place, pieces = (stage.stage, stage.chunk), 1 if plan.head is None else plan.head.pieces
    last = place == (plan.parallel.pipeline - 1, plan.parallel.chunks - 1)
    return ends_of(prices.profile, prices.message_bytes, first=place == (0, 0), last=last, pieces=pieces)


def _copy(stage: Stage, offload: Offload, profile: Profile, movable_bytes: int) -> HostCopy:
    """Limited by the movable bytes. Without a link to the host in the profile it takes no time."""
    received_bytes = profile.attention.input_bytes
    if (stage.stage, stage.chunk) == (0, 0) and received_bytes >= offload.smallest_tensor_bytes:
        movable_bytes += received_bytes
    size_bytes = min(offload.bytes, movable_bytes)
    seconds = profile.link_s("host", size_bytes)
    return HostCopy(seconds, seconds, size_bytes, offload.beside_messages == "avoid")


def _movable_of_halves(plan: Plan, offload: Offload, profile: Profile, treated: Sequence[Treated]) -> Iterator[int]:
    """Bytes of each half that can be offloaded, in forward order. Excluded are the chunk's input, which Megatron refers to until
    its forward is over, the inputs of nodes of the combined schedule, and experts unless the plan includes them."""
    smallest_bytes, in_nodes, feeds = offload.smallest_tensor_bytes, plan.model.moe_overlapped, False
    received_bytes = profile.attention.input_bytes if profile.attention.input_bytes >= smallest_bytes else 0
    for number, half in enumerate(treated):
        section, fed, feeds = half.section, feeds, half.planned.feeds
        if section.kept_whole or (section.exchanges and not offload.experts):
            yield 0
            continue
        costs = profile.of(section)
        recompute = recomputation_of(section, costs.tensors, half.planned.recompute, whole=feeds)
        given = not (fed or section.apart) and (number == 0 or in_nodes)
        yield movable_bytes(section, costs, recompute, smallest_bytes, fed=fed) - (received_bytes if given else 0)


def _half_by_half(offload: Offload, prices: Prices, treated: Sequence[Treated], movable: Sequence[int]) -> Iterator[Treated]:
    pace, left_bytes = Pace(offload.pace_bytes, len(treated)), offload.bytes
    for place, (half, most_bytes) in enumerate(zip(treated, movable, strict=True), start=1):
        stays = pace.stays(place) or offload.stays(half.planned)
        size_bytes = 0 if stays else min(left_bytes, most_bytes)
        if size_bytes <= 0:
            yield replace(half, host=_host_s(half.planned, prices, offloads=False))
            continue
        left_bytes -= size_bytes
        turns = pace.leaves(place, size_bytes, half.planned.ahead)
        yield replace(half, leaving=Leaving(size_bytes, prices.profile.link_s("host", size_bytes), turns))


def check_shapes(plan: Plan, profile: Profile) -> None:
    """Raises `PlanMismatch` for every fact in which plan and profile differ."""
    facts = plan.model.model_dump() | plan.parallel.model_dump() | plan.batch.model_dump()
    facts["latent"] = facts.pop("latent_attention")
    profiled = {name: value for name, value in profile.shape.model_dump().items() if name in facts}
    if (experts := profile.shape.experts) is not None:
        profiled |= {"moe_load": experts.held_load, "shared_experts": experts.shared_ffn > 0}
    known = {
        f"shape.{name}": (value, facts[name], "measure the plan's job")
        for name, value in profiled.items()
        if (name, facts[name]) != ("expert", 1)  # without exchanges in windows `expert` does not matter
    }
    layers, opaque = plan.model.layers, {layer.kind for layer in profile.shape.opaque}
    having = () if experts is None else experts.numbers(layers)
    needed = filter(plan.model.has_experts, range(1, layers + 1))
    numbers = (", ".join(map(str, as_spans(numbers))) or "none" for numbers in (having, needed))
    kinds = (", ".join(sorted(kinds)) or "none" for kinds in (opaque, plan.model.opaque_layers))
    for name, (value, wanted) in (("layers with experts", numbers), ("shape.opaque", kinds)):
        known[name] = value, wanted, "take the plan's job"
    problems = [
        Problem(f"profile: {name}", str(value), f"{planned}, as in the plan", todo)
        for name, (value, planned, todo) in known.items()
        if value != planned
    ]
    if problems:
        raise PlanMismatch("the profile was measured for another job than the plan's", problems)


def treated_halves(stage: Stage, planned: Iterable[PlannedHalf], prices: Prices) -> Iterator[Treated]:
    fed = False
    for half in planned:
        rest_in_wait = half.rest_after is not None
        checkpoint = Checkpoint(half.feeds, fed, half.ahead_to, half.gathers_ahead, rest_in_wait) if half.checkpoint else None
        fed = half.feeds
        yield Treated(
            half,
            prices.of(half.section, half.recompute, checkpoint),
            gathers_s=_gathers_s(half, prices),
            host=_host_s(half, prices, offloads=stage.offload is not None),
            deferred={linear: prices.weight_gradient(half.section, linear) for linear in half.deferred},
        )


def _host_s(half: PlannedHalf, prices: Prices, *, offloads: bool) -> Passes:
    deferred = sum(half.pieces.get(linear, 1) for linear in half.deferred)
    return prices.once(
        half_host_s, half.section, half.recompute, checkpointed=half.checkpoint, offloads=offloads, deferred=deferred
    )


def _gathers_s(half: PlannedHalf, prices: Prices) -> dict[Window, tuple[float, float]]:
    """Costs of gathering a half's input at the plan's place, and on demand."""
    costs_s: dict[Window, tuple[float, float]] = {}
    for gather in () if half.place.gather is None else (half.place.gather, ON_DEMAND):
        behind = prices.profile.shape.halves[gather.half] if isinstance(gather, WindowAddress) else None
        whole = behind is not None and behind.half == half.half
        costs_s[gather] = prices.once(gather_lost_and_spared_s, half.section, behind, prices.message_bytes, whole=whole)
    return costs_s
