"""Simulates a plan without ranks: its schedule, its costs from a profile, and the step.

plan ──schedule.flushes──> order of every stage          ─┐
  └──rules, profile──> treated halves, host copies ──────┴──simulate──> Simulation
                                                         └──simulate_without_flushes──> a run, and a batch of its steady state
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean
from types import MappingProxyType

from megatron_lynx.anatomy.address import ON_DEMAND, Window, WindowAddress
from megatron_lynx.config.experts import as_spans
from megatron_lynx.config.job import Job
from megatron_lynx.cost.combined import Beside, Nodes, keeping_all, nodes_of, paired_s, shared_rates
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
from megatron_lynx.simulator.passes import ChunkPasses, HostCopy, TimedPass
from megatron_lynx.simulator.simulate import simulate
from megatron_lynx.simulator.simulation import Simulation, in_steady_state, most_beside
from megatron_lynx.simulator.walk import Leaving, Treated
from megatron_lynx.timeline import Passes, Span
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
    stages = [
        RehearsedStage(plan, stage, Prices(loaded[stage], less_in_hand) if stage in loaded else usual, job)
        for stage in range(plan.parallel.pipeline)
    ]
    chunks, p2p_s = [stage.passes() for stage in stages], profile.link_s("p2p", profile.attention.input_bytes)
    layout, microbatches = plan.parallel, plan.batch.microbatches
    if plan.schedule == "double_buffered":
        only = [passes for (passes,) in chunks]
        return simulate_without_flushes(microbatches, only, p2p_s, profile.interference, deferred=plan.defer_updates)

    def simulated(chunks: Sequence[Sequence[ChunkPasses]], more: int = 0) -> Simulation:
        """`more`: additional warm-up forwards."""

        def of_few(few: int) -> Simulation:
            schedule = with_flushes(layout.pipeline, few, layout.chunks, layout.group, more)
            return simulate(schedule, chunks, p2p_s, profile.interference, between_passes=profile.messages_between_passes)

        if whole or any(entry.whole is not None for entry in plan.stages):  # not all micro-batches are alike
            return of_few(microbatches)
        return in_steady_state(max(layout.pipeline, layout.group), microbatches, of_few)

    apart = simulated(chunks)
    if not plan.model.moe_overlapped:
        return apart
    beside = shared_rates(profile, 1.0 if job is None else job.fused_dispatch.computing_kept)
    pairs = [stage.pairs(passes, beside) for stage, passes in zip(stages, chunks, strict=True)]
    more_bytes = tuple(most_beside(passes, stage.layer_bytes) for stage, passes in zip(stages, chunks, strict=True))
    return replace(simulated(pairs, more=1), apart=apart, more_bytes=more_bytes)


@dataclass(frozen=True)
class RehearsedStage:
    """A stage of a plan, with the prices of its profile. `job`: as in `rehearse`."""

    plan: Plan
    stage: int
    prices: Prices
    job: Job | None = None

    @cached_property
    def entries(self) -> tuple[Stage, ...]:
        return self.plan.chunks_of(self.stage)

    @cached_property
    def timetable(self) -> Timetable:
        return timetable_of(self.plan, self.stage)

    @cached_property
    def halves(self) -> list[list[Treated]]:
        """By chunk, in forward order."""
        chunks = zip(self.entries, self.timetable.chunks, strict=True)
        return [list(treated_halves(entry, planned, self.prices)) for entry, planned in chunks]

    @cached_property
    def ends(self) -> list[tuple[BlockProfile, BlockProfile]]:
        """By chunk, the embedding and the head, without seconds if it has none."""
        plan, prices, places = self.plan, self.prices, [(self.stage, entry.chunk) for entry in self.entries]
        last, pieces = (plan.parallel.pipeline - 1, plan.parallel.chunks - 1), 1 if plan.head is None else plan.head.pieces
        ends = partial(ends_of, prices.profile, prices.message_bytes, pieces=pieces)
        return [ends(first=place == (0, 0), last=place == last) for place in places]

    @property
    def reduces_in_backward(self) -> bool:
        """Whether it reduces gradients during the last micro-batch's backward, as `apply.live_run` finds it."""
        job = self.job
        if job is None or not job.overlap.gradients:
            return False
        return not job.overlap.aligned or job.parallel.pipeline == 1 or (self.stage == 0 and job.chunks == 1)

    @property
    def layer_bytes(self) -> int:
        """Bytes of its largest layer without recomputation."""
        kinds = {self.plan.model.sections_of(layer) for entry in self.entries for layer in entry.layers}
        halves = [[self.prices.profile.of(section) for section in kind] for kind in kinds]
        return max(sum(half.input_bytes + sum(tensor.bytes for tensor in half.tensors) for half in layer) for layer in halves)

    def passes(self) -> list[ChunkPasses]:
        """By chunk."""
        return [self._chunk_passes(chunk) for chunk in range(len(self.entries))]

    def _chunk_passes(self, chunk: int) -> ChunkPasses:
        entry, halves, prices = self.entries[chunk], self.halves[chunk], self.prices
        made = partial(
            stage_passes,
            prices=prices,
            ends=self.ends[chunk],
            deferral=(chunk, 0 if entry.weight_gradients is None else entry.weight_gradients.bytes),
            reduced_in_backward=self.reduces_in_backward,
            read_after_send=self.stage > 0 and self.plan.schedule == "flush",
        )
        passes, offload = made(self.timetable, chunk, halves), entry.offload
        if offload is not None:
            movable = list(_movable_of_halves(self.plan, offload, prices.profile, halves))
            passes = replace(passes, copy=_copy(entry, offload, prices.profile, sum(movable)))
            if offload.pace_bytes is not None:
                within = made(self.timetable, chunk, list(_half_by_half(offload, prices, halves, movable)))
                passes = within if offload.half_by_half == "all" else replace(passes, at_once=within)
        if entry.whole is None:
            return passes
        beside = self.timetable.beside_kept(chunk)
        kept = list(treated_halves(entry, beside.chunks[-1], prices))
        return replace(passes, whole=entry.whole, keeping=made(beside, len(beside.chunks) - 1, kept))

    def pairs(self, passes: Sequence[ChunkPasses], beside: Beside) -> list[ChunkPasses]:
        """The chunks' passes in pairs (`Simulation`). A steady forward is paired equally often with each chunk's backward."""
        pair_s, pairs = partial(paired_s, beside=beside, delayed=self.plan.model.moe_delayed), []
        keeping, recomputing = ([self._nodes(halves, again) for halves in self.halves] for again in (False, True))
        again_s = fmean(sum(half.again_s for half in halves) for halves in self.halves)
        backward_s = fmean(sum(end.backward_s for end in ends) for ends in self.ends)
        for chunk, apart in enumerate(passes):
            nodes_s, kept_s = (fmean(pair_s(keeping[chunk], other) for other in others) for others in (recomputing, keeping))
            exposed_s = min(max(nodes_s - kept_s, 0.0), again_s)
            seconds, waited_s, copy = nodes_s + backward_s + sum(end.forward_s for end in self.ends[chunk]), 0.0, apart.copy
            if copy is not None and apart.at_once is not None:
                copied_s, copy = copy.out_s / (1 - 1 / len(self.halves[chunk])), None  # the last half is not copied
                waited_s = max(0.0, copied_s - seconds)
            spans = (Span("forward", 0.0, seconds),)
            both = TimedPass(seconds + waited_s, again_s - exposed_s, exposed_s, spans=spans, copy_wait_s=waited_s)
            host_s = apart.one("F", "steady").host_s + fmean(other.one("B", "steady").host_s for other in passes)
            pairs.append(replace(apart.with_steady(both.issued_in(host_s), TimedPass()), copy=copy, at_once=None))
        return pairs

    def _nodes(self, halves: Sequence[Treated], recomputing: bool) -> tuple[Nodes, ...]:
        """The layers of a chunk. `recomputing`: whether recomputation is a part of their backward."""
        profile, nodes = self.prices.profile, []
        for layer in zip(*[iter(halves)] * 2, strict=True):
            sections = layer[0].section, layer[1].section
            costs = keeping_all(profile, sections)
            if recomputing:
                costs = tuple(replace(cost, again_s=half.again_s) for cost, half in zip(costs, layer, strict=True))
            nodes.append(nodes_of(profile, costs, sections))
        return tuple(nodes)


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
    if facts["expert"] == 1:  # without exchanges in windows it does not matter
        del facts["expert"]
    profiled = profile.shape.model_dump()
    if (experts := profile.shape.experts) is not None:
        profiled |= {"moe_load": experts.held_load, "shared_experts": experts.shared_ffn > 0}
    todo = "measure the plan's job"
    known = {f"shape.{name}": (value, facts[name], todo) for name, value in profiled.items() if name in facts}
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
        gathers = () if half.gathered is None else (half.gathered, ON_DEMAND)
        yield Treated(
            half,
            prices.of(half.section, half.recompute, checkpoint),
            gathers_s={gather: _gather_s(half, gather, prices) for gather in gathers},
            host=_host_s(half, prices, offloads=stage.offload is not None),
            deferred={linear: prices.weight_gradient(half.section, linear) for linear in half.deferred},
        )


def _host_s(half: PlannedHalf, prices: Prices, *, offloads: bool) -> Passes:
    deferred, checkpointed = sum(half.pieces.get(linear, 1) for linear in half.deferred), half.checkpoint
    return prices.once(half_host_s, half.section, half.recompute, checkpointed=checkpointed, offloads=offloads, deferred=deferred)


def _gather_s(half: PlannedHalf, window: Window, prices: Prices) -> tuple[float, float]:
    """Costs of gathering a half's input after a window, or on demand."""
    behind = prices.profile.shape.halves[window.half] if isinstance(window, WindowAddress) else None
    whole = behind is not None and behind.half == half.half
    return prices.once(gather_lost_and_spared_s, half.section, behind, prices.message_bytes, whole=whole)
