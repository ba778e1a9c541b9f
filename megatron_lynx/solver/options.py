"""Options for one half of a layer: tensors kept, items recomputed and where, and their cost.

subsets of items ──recomputation_of──> items run, kept, recomputed    ──Seats──> windows ──> Option, Option, ...
checkpoints      ──recomputation_of──> ...                             ──on demand─────────> of the half, and of the layer
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_lynx.anatomy import HALVES, Half, Section, by_layer
from megatron_lynx.anatomy.address import own_window, resumes_in_wait
from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import loss_bytes
from megatron_lynx.cost.communication import before_core_s, behind_gather_s
from megatron_lynx.cost.host import half_host_s
from megatron_lynx.cost.moments import less_in_hand_bytes
from megatron_lynx.cost.recompute import INSIDE, Checkpoint, sensible_choices
from megatron_lynx.cost.section import PricedSection, Prices
from megatron_lynx.cost.stage import HalfSeconds, chunks_in_flight, half_seconds, stage_seconds
from megatron_lynx.fp8_recipes import gathers_once
from megatron_lynx.kinds.latent.section import core_kept
from megatron_lynx.once import once
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.solver.problem import Choices, Grouped, Option, StageProblem
from megatron_lynx.solver.seats import NOWHERE, HalfKind, Placement, Portion, Seat, Seats, Wait, held_in
from megatron_lynx.timeline import Passes
from megatron_lynx.timetable import ahead_to, may_gather_ahead
from megatron_lynx.units import MIB

Layer = tuple[Checkpoint, Checkpoint]
"""Checkpoints of the attention half and the MLP half of a layer."""


def ways_ahead(profile: Profile, sections: tuple[Section, Section], layer: Layer) -> Iterator[Layer]:
    """Yield a checkpointed layer as it is, then with a dispatch or a reduction ahead, then with the gather before it ahead as
    well, as far as possible. `sections`: of both halves."""
    experts, shape = sections[1].exchanges, profile.shape
    first, second = (
        one._replace(ahead_to=ahead_to(section, experts=experts, feeds=one.feeds))
        for section, one in zip(sections, layer, strict=True)
    )
    yield from dict.fromkeys((layer, (first, second)))
    gathers = shape.sequence_parallel and shape.tensor > 1 and gathers_once(shape.fp8)
    if gathers and may_gather_ahead(sections[0], experts=experts, feeds=first.feeds):
        yield first._replace(gathers_ahead=True), second


def spared_s(
    profile: Profile, price: PricedSection, section: Section, checkpoint: Checkpoint | None, layer: tuple[Section, Section]
) -> float:
    """Return the seconds that a checkpoint saves because its communication runs during the attention backward of the layer above.

    Tokens travel during that whole attention backward. With sequence parallelism a reduction travels between two gathers. After a
    gather, communication starts at the core attention.

    layer: the sections of the layer itself, and of the layer above.
    """
    if checkpoint is None or checkpoint.ahead_to is None or not price.stops:
        return 0.0
    attention, mlp = layer
    between_gathers = profile.shape.sequence_parallel and not mlp.exchanges
    computes_s = behind_gather_s(profile, attention) if between_gathers else profile.of(attention).backward_s
    before_s = before_core_s(profile, attention) if checkpoint.gathers_ahead else 0.0
    return sum(
        min(begun.under_way_s / profile.interference, computes_s - before_s if item == checkpoint.ahead_to else before_s)
        - begun.again_s
        for item, begun in price.stops.items()
    )


LAYER: Mapping[Half, Checkpoint] = dict(zip(HALVES, (Checkpoint(feeds=True), Checkpoint(fed=True)), strict=True))
"""Both halves of a checkpointed layer, which keeps its input only."""


def stays_whole(job: Job, section: Section) -> bool:
    """Whether a section stays whole and on the device: it is opaque, or it has experts that are."""
    return section.kept_whole or (section.exchanges and job.model.experts_whole)


def may_checkpoint(job: Job, section: Section, checkpoint: Checkpoint) -> bool:
    """Whether a half, or its part of a layer, may be checkpointed together with its communication.

    Opaque sections and some of sparse attention may not. Beside overlapped exchanges a layer cannot run again as a whole, and
    rows of experts would travel again. Layers with captured parts may not either.
    """
    if (
        section.kept_whole
        or job.model.experts_whole
        or core_kept(section, job.model.latent, job.model.fp8)
        or asks_host(job, section, checkpoint.items(section))
    ):
        return False
    return not (section.apart or (checkpoint.joined and (job.model.moe_overlapped or job.model.captured)))


def asks_host(job: Job, section: Section, items: Collection[str]) -> bool:
    """Whether recomputing these items makes the host wait for the device: the rotary embedding is among them."""
    if not job.rotary_asks_host or "rotary" not in section.names:
        return False
    return any(section.index(item) >= section.index("rotary") for item in items)


@dataclass(frozen=True)
class HalfOptions:
    """Options of halves, priced once for all stages, however many layers these have."""

    job: Job
    profile: Profile

    def in_order(self, sections: Sequence[Section]) -> Iterator[Choices]:
        """Yield the choices of a chunk's halves, in forward order."""
        kinds = [HalfKind(*neighbours) for neighbours in zip(sections, (*sections[1:], None), strict=False)]
        for attention, mlp in by_layer(kinds):
            yield self._at_top(attention, mlp.section) if mlp.last else self._offered(attention, mlp.section)
            yield self._offered(mlp, attention.section)

    @once
    def inside_of(self, section: Section) -> Grouped | None:
        if not may_checkpoint(self.job, section, INSIDE):
            return None
        both = (self._with_rest_in_wait(section, checkpoint) for checkpoint in (LAYER[section.half], INSIDE))
        return Grouped(*(self._checkpoint(section, checkpoint) for checkpoint in both))

    @cached_property
    def seconds(self) -> Mapping[Section, HalfSeconds]:
        return {section: half_seconds(self.profile, section) for section in self.job.model.every_section}

    @once
    def _at_top(self, kind: HalfKind, other: Section) -> Choices:
        """In the last layer of a stage nothing begins ahead, and an input has fewer windows after which it is gathered."""
        choices = self._offered(kind, other)
        return Choices(one for one in choices if self._seats.at_top(kind, one.seat) and not one.begins_ahead)

    @once
    def _offered(self, kind: HalfKind, other: Section) -> Choices:
        """Return the choices on every stage: all subsets in the seats of its backward, then checkpoints.

        other: section of the layer's other half. Beside an opaque one the layer is no checkpoint.
        """
        choices = Choices((*self._seated(kind), *self._checkpoints(kind, other)))
        return choices.apart if other.kept_whole else choices

    @once
    def _seated(self, kind: HalfKind) -> tuple[Option, ...]:
        return tuple(
            self._option(items, replace(price, memory=held_in(price, kind.section, seat)), seat, host)
            for items, price, host in self._recomputations_of(kind.section)
            for seat in self._seats.everywhere(kind, items, price)
        )

    def _option(
        self, items: tuple[str, ...], price: PricedSection, seat: Seat, host: Passes, checkpoint: Checkpoint | None = None
    ) -> Option:
        exposed_s = seat.exposed_s(price.recompute_s, self.profile.interference)
        return Option(items, price.memory, seat, price.recompute_s, exposed_s, price.flops, host, checkpoint)

    def _checkpoints(self, kind: HalfKind, other: Section) -> Iterator[Option]:
        """Yield a checkpoint of the half if it keeps less than every subset does, and the half's part of a checkpointed layer."""
        least_bytes = min(price.memory.resident for _, price, _ in self._recomputations_of(kind.section))
        for checkpoint in (Checkpoint(), LAYER[kind.half]):
            if not may_checkpoint(self.job, kind.section, checkpoint):
                continue
            for way in self._ways(kind, other, joined=checkpoint.joined):
                option = self._checkpoint(kind.section, way, other)
                if option.joined or option.memory.resident < least_bytes:
                    yield option

    def _checkpoint(self, section: Section, checkpoint: Checkpoint, other: Section | None = None) -> Option:
        """Return the option of a checkpoint. `other`: section of the layer's other half, if the checkpoint may begin ahead."""
        items = checkpoint.items(section)
        price = self.prices.of(section, items, checkpoint)
        waits_s = price.communicates_s
        if other is not None:
            attention, mlp = (section, other) if section.half == HALVES[0] else (other, section)
            waits_s -= spared_s(self.profile, price, section, checkpoint, (attention, mlp))
        rest = NOWHERE
        if checkpoint.rest_in_wait:
            (begun,), (window_s, *_) = price.stops.values(), self.prices.windows_s("bwd", section, ())
            own_wait = Wait(own_window(section.half), window_s)
            rest = Placement((Portion(own_wait, price.recompute_s - begun.seconds + begun.again_s),))
            waits_s += 0.0 if checkpoint.ahead_to else begun.again_s
        host = half_host_s(self.profile, section, items, checkpointed=True)
        return self._option(items, price, Seat(rest, gather_s=waits_s), host, checkpoint)

    def _with_rest_in_wait(self, section: Section, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with the rest of its recomputation in its first wait, if it may run there.

        It may if it has a wait and backward needs no dropout mask before that. Experts with tensor parallelism would exchange
        rows once more there, which no window allows (rule R2).
        """
        layout, model = self.job.parallel, self.job.model
        exchanges = section.exchanges_in_windows and layout.expert > 1 and layout.expert_tensor_size == 1
        gathers = layout.sequence_parallel and layout.tensor > 1
        userbuffers = self.job.no_windows
        waits = resumes_in_wait(section, model.fp8_recipe, exchanges=exchanges, gathers=gathers, userbuffers=userbuffers)
        may = waits and not checkpoint.feeds and not model.hidden_dropout
        return checkpoint._replace(rest_in_wait=may and self.prices.windows_s("bwd", section, ())[0] > 0)

    @once
    def _ways(self, kind: HalfKind, other: Section, *, joined: bool) -> tuple[Checkpoint, ...]:
        """Return the checkpoints of a half, as it is and begun ahead in each possible way. A stage's last MLP half begins none.

        `joined`: of a checkpointed layer; those of its other half belong to these, one to one.
        """
        first = kind.half == HALVES[0]
        sections = (kind.section, other) if first else (other, kind.section)
        attention, mlp = LAYER.values() if joined else (Checkpoint(), Checkpoint())
        layer = (attention, self._with_rest_in_wait(sections[1], mlp))
        begins = not (kind.last or self.job.no_windows or any(section.kept_whole for section in sections))
        ways = (way[not first] for way in (ways_ahead(self.profile, sections, layer) if begins else [layer]))
        return tuple(ways if joined else dict.fromkeys(ways))

    @cached_property
    def prices(self) -> Prices:
        return Prices(self.profile, less_in_hand_bytes(self.job))

    @cached_property
    def _seats(self) -> Seats:
        return Seats(self.job, self.profile)

    @once
    def _recomputations_of(self, section: Section) -> list[tuple[tuple[str, ...], PricedSection, Passes]]:
        """Sets of items of a section that may be recomputed, with their costs, whatever half comes before."""
        known = list[tuple[tuple[str, ...], PricedSection, Passes]]()
        whole_inputs = self.job.keeps_gathered or (self.job.parallel.sequence_parallel and not section.has_windows)
        stays = stays_whole(self.job, section)
        shape, tensors = self.profile.shape, self.profile.of(section).tensors
        sliced, te = shape.sequence_parallel, self.job.model.uses_te
        for items in sensible_choices(section, tensors, shape.context, sequence_parallel=sliced, te=te):
            if (stays and items) or asks_host(self.job, section, items):
                continue
            if whole_inputs and section.gathered in items:
                continue  # what owns a userbuffer does not run again, nor what nothing gathers the input for
            price = self.prices.of(section, items)
            if stays:
                price = replace(price, memory=replace(price.memory, movable=0))
            elif self.job.model.moe_overlapped and not section.apart:  # Megatron holds the input of a node
                movable_bytes = price.memory.movable - self.profile.of(section).input_bytes
                price = replace(price, memory=replace(price.memory, movable=max(0, movable_bytes)))
            known.append((items, price, half_host_s(self.profile, section, items)))
        return known


@dataclass(frozen=True)
class StageProblems:
    job: Job
    options: HalfOptions
    """The same job's, whatever the layers of its stages."""

    @once
    def of(self, stage: int, chunks: tuple[int, ...] | None = None) -> StageProblem:
        """`chunks`: chunks that are treated alike; None for all."""
        budget_mib, chunks = self.job.budget.activation_mib, chunks or tuple(range(self.job.chunks))
        layers = self.job.layers_of(stage, chunks[0])
        sections = [section for layer in layers for section in self.job.model.sections(layer)]
        problem = StageProblem(
            stage,
            tuple(self.options.in_order(sections)),
            in_flight=chunks_in_flight(self.job, stage),
            budget_bytes=None if budget_mib is None else int(budget_mib * MIB),
            inside=tuple(map(self.options.inside_of, sections)),
            device=self._device(stage, chunks) if layers else None,
            forward_s=sum(self.options.seconds[section].forward_s for section in sections),
            loss_bytes=self._loss_bytes(stage, chunks),
        )
        return problem if self.job.policy == "planned" else problem.under(self.job.policy)

    def _device(self, stage: int, chunks: tuple[int, ...]) -> Passes | None:
        """Return the seconds of one micro-batch in one of the chunks. The ends of the model are divided among all chunks of the
        stage."""
        if self.options.profile.host_time is None:
            return None
        whole = stage_seconds(self.job, self.options.profile, stage)
        part = self.job.chunk_layers(stage)[chunks[0]] / self.job.layers_on(stage)
        return Passes(part * whole.forward_s, part * whole.backward_s)

    def _loss_bytes(self, stage: int, chunks: tuple[int, ...]) -> int:
        last = stage == self.job.parallel.pipeline - 1 and self.job.chunks - 1 in chunks
        return loss_bytes(self.job, stage) if last else 0
