"""Options for one half of a layer: tensors kept, items recomputed and where, and their cost.

subsets of items ──recomputation_of──> items run, kept, recomputed    ──Seats──> windows ──> Option, Option, ...
checkpoints      ──recomputation_of──> ...                             ──on demand─────────> of the half, and of the layer
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_lynx.anatomy import HALVES, Half, Section
from megatron_lynx.anatomy.in_time import own_window, resumes_in_wait
from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import loss_bytes
from megatron_lynx.cost.host import half_host_s
from megatron_lynx.cost.in_hand import less_in_hand_bytes
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.prices import Prices
from megatron_lynx.cost.recompute import INSIDE, Checkpoint, sensible_choices
from megatron_lynx.cost.section import PricedSection, priced
from megatron_lynx.cost.stage import HalfSeconds, chunks_in_flight, half_seconds, stage_seconds
from megatron_lynx.kinds.sparse.section import core_kept
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.solver.ahead import Layer, begun_ahead, spared_s
from megatron_lynx.solver.placement import NOWHERE, Placement, Portion, Seat, held_in
from megatron_lynx.solver.problem import Choices, Grouped, Option, StageProblem
from megatron_lynx.solver.seats import HalfKind, Seats
from megatron_lynx.timeline import Passes
from megatron_lynx.units import MIB


@dataclass(frozen=True)
class Subset:
    """A set of recomputed items of one kind of half, wherever it runs."""

    kind: HalfKind
    recompute: tuple[str, ...]
    backward: tuple[Placement, ...]
    """In windows of the backward, the best first."""
    price: PricedSection
    """Cost and memory of recomputation on demand."""
    host: Passes
    known: dict[tuple[Placement, str | None], HalfMemory] = field(default_factory=dict, compare=False, repr=False)
    """Memory by placement and gather, under the one profile of its problems."""

    def option(self, seat: Seat, profile: Profile, attention: Section) -> Option:
        """Return the option with this seat. `attention`: section of attention halves."""
        price = self.price
        return Option(
            self.recompute,
            self._held(seat.placement, seat.gather, profile, attention),
            seat,
            recompute_s=price.recompute_s,
            exposed_s=seat.exposed_s(price.recompute_s, profile.interference),
            flops=price.flops,
            host=self.host,
        )

    def _held(self, placement: Placement, gather: str | None, profile: Profile, attention: Section) -> HalfMemory:
        if (placement, gather) not in self.known:
            self.known[placement, gather] = self._held_anew(placement, gather, profile, attention)
        return self.known[placement, gather]

    def _held_anew(self, placement: Placement, gather: str | None, profile: Profile, attention: Section) -> HalfMemory:
        price, shape, before = self.price, profile.shape, self.kind.before
        return held_in(
            price.memory,
            self.kind.section,
            placement,
            gather,
            price.stops,
            sequence_parallel=shape.sequence_parallel,
            exchanges=0 if before is None or shape.expert == 1 else len(before.exchanges_of.get("bwd", ())),
            attention=attention,
        )


LAYER: Mapping[Half, Checkpoint] = dict(zip(HALVES, (Checkpoint(feeds=True), Checkpoint(fed=True)), strict=True))
"""Both halves of a checkpointed layer, which keeps its input only."""


ROTARY = "rotary"


def stays_whole(job: Job, section: Section) -> bool:
    """Whether a section stays whole and on the device: it is opaque, or it has experts that are."""
    return section.kept_whole or (section.exchanges and job.model.experts_whole)


def _reduces_ahead(option: Option) -> bool:
    """Whether this is an attention half whose reduction begins ahead."""
    return option.checkpoint is not None and option.checkpoint.ahead_to in option.recompute[:-1]


def _partners(kinds: Sequence[HalfKind]) -> Iterator[HalfKind]:
    """Yield for every half, in order, the other half of its layer."""
    for first, second in zip(*[iter(kinds)] * len(HALVES), strict=True):
        yield from (second, first)


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
    if not job.rotary_asks_host or ROTARY not in section.names:
        return False
    return any(section.index(item) >= section.index(ROTARY) for item in items)


@dataclass(frozen=True)
class StageProblems:
    """Problems of all stages of a job. What several stages need is priced once."""

    job: Job
    profile: Profile

    def of(self, stage: int, chunks: tuple[int, ...] | None = None) -> StageProblem:
        """Return the problem of one stage. `chunks`: chunks that are treated alike; None for all."""
        budget_mib, chunks = self.job.budget.activation_mib, chunks or tuple(range(self.job.chunks))
        layers = self.job.layers_of(stage, chunks[0])
        sections = [section for layer in layers for section in self.job.model.sections(layer)]
        return StageProblem(
            stage,
            tuple(self._halves(sections)),
            in_flight=chunks_in_flight(self.job, stage),
            budget_bytes=None if budget_mib is None else int(budget_mib * MIB),
            inside=tuple(map(self._inside_of, sections)),
            device=self._device(stage, chunks) if layers else None,
            forward_s=sum(self._half_seconds[section].forward_s for section in sections),
            loss_bytes=self._loss_bytes(stage, chunks),
        )

    def _halves(self, sections: Sequence[Section]) -> Iterator[Choices]:
        """Yield the choices of each half, in forward order."""
        kinds = [HalfKind(*neighbours) for neighbours in zip(sections, (*sections[1:], None), strict=False)]
        for kind, other in zip(kinds, _partners(kinds), strict=True):
            choices = self._offered(kind, other.section)
            yield self._at_top(kind, choices) if other.last else choices

    def _at_top(self, kind: HalfKind, attention: Choices) -> Choices:
        """Return an attention half's choices as they are in the last layer of a stage.

        An option whose gather has no window there takes the best seat without a gather.
        """
        alike = [self._seats.at_top(kind, option.seat) and not _reduces_ahead(option) for option in attention]
        if all(alike):
            return attention
        if id(attention) not in self._tops:
            best: dict[tuple[str, ...], Option] = {}
            for option in attention:
                if self._seats.at_top(kind, option.seat) and option.checkpoint is None:
                    best[option.recompute] = min(best.get(option.recompute, option), option, key=lambda one: one.longer_s)
            self._tops[id(attention)] = Choices(
                option if same else best[option.recompute] if option.checkpoint is None else self._begun_at_top(kind, option)
                for option, same in zip(attention, alike, strict=True)
            )
        return self._tops[id(attention)]

    @cached_property
    def _tops(self) -> dict[int, Choices]:
        """By identity of the choices below, which `_known_offered` keeps."""
        return {}

    def _device(self, stage: int, chunks: tuple[int, ...]) -> Passes | None:
        """Return the seconds of one micro-batch in one of the chunks. The ends of the model are divided among all chunks of the
        stage."""
        if self.profile.host_time is None:
            return None
        whole = stage_seconds(self.job, self.profile, stage)
        part = self.job.chunk_layers(stage)[chunks[0]] / self.job.layers_on(stage)
        return Passes(part * whole.forward_s, part * whole.backward_s)

    @cached_property
    def _half_seconds(self) -> Mapping[Section, HalfSeconds]:
        return {section: half_seconds(self.profile, section) for section in self.job.model.every_section}

    def _loss_bytes(self, stage: int, chunks: tuple[int, ...]) -> int:
        """Return the bytes of the loss if these chunks include the model's last one, and 0 otherwise."""
        last = stage == self.job.parallel.pipeline - 1 and self.job.chunks - 1 in chunks
        return loss_bytes(self.job, stage) if last else 0

    def _inside_of(self, section: Section) -> Grouped | None:
        if section not in self._known_inside:
            able = may_checkpoint(self.job, section, INSIDE)
            options = (
                self._checkpoint(section, self._with_rest_in_wait(section, checkpoint))
                for checkpoint in (LAYER[section.half], INSIDE)
            )
            self._known_inside[section] = Grouped(*options) if able else None
        return self._known_inside[section]

    @cached_property
    def _known_inside(self) -> dict[Section, Grouped | None]:
        return {}

    def _offered(self, kind: HalfKind, other: Section) -> Choices:
        """Return the choices on every stage: all subsets in the seats of its backward, then checkpoints.

        other: section of the layer's other half. Beside an opaque one the layer is no checkpoint.
        """
        if (kind, other) not in self._known_offered:
            subsets = self._subsets_of(kind)
            seated = self._priced(subsets)
            choices = Choices((*seated, *self._checkpoints(kind, other, subsets)))
            self._known_offered[kind, other] = choices.apart if other.kept_whole else choices
        return self._known_offered[kind, other]

    @cached_property
    def _known_offered(self) -> dict[tuple[HalfKind, Section], Choices]:
        return {}

    def _subsets_of(self, kind: HalfKind) -> tuple[Subset, ...]:
        if kind not in self._known_subsets:
            self._known_subsets[kind] = tuple(
                Subset(kind, items, tuple(self._seats.backward(kind, items, price)), price, host)
                for items, price, host in self._recomputations_of(kind.section)
            )
        return self._known_subsets[kind]

    @cached_property
    def _known_subsets(self) -> dict[HalfKind, tuple[Subset, ...]]:
        return {}

    def _checkpoints(self, kind: HalfKind, other: Section, subsets: Sequence[Subset]) -> Iterator[Option]:
        """Yield a checkpoint of the half if it keeps less than every subset does, and the half's part of a checkpointed layer."""
        least_bytes = min(subset.price.memory.resident for subset in subsets)
        for checkpoint in (Checkpoint(), LAYER[kind.half]):
            if not may_checkpoint(self.job, kind.section, checkpoint):
                continue
            begun = self._begun(kind, other, self._with_rest_in_wait(kind.section, checkpoint))
            option = self._checkpoint(kind.section, begun, other)
            if option.joined or option.memory.resident < least_bytes:
                yield option

    def _checkpoint(self, section: Section, checkpoint: Checkpoint, other: Section | None = None) -> Option:
        """Return the option of a checkpoint. `other`: section of the layer's other half, if the checkpoint may begin ahead."""
        items = checkpoint.items(section)
        price = self._prices.of(section, items, checkpoint)
        waits_s = price.communicates_s
        if other is not None:
            attention, mlp = (section, other) if section.half == HALVES[0] else (other, section)
            waits_s -= spared_s(self.profile, price, section, checkpoint, (attention, mlp))
        rest = NOWHERE
        if checkpoint.rest_in_wait:
            (begun,), (window_s, *_) = price.stops.values(), self._prices.windows_s("bwd", section, ())
            rest = Placement((Portion(own_window(section.half), window_s, price.recompute_s - begun.seconds + begun.again_s),))
            waits_s += 0.0 if checkpoint.ahead_to else begun.again_s
        seat = Seat(rest, gather_s=waits_s)
        return Option(
            items,
            price.memory,
            seat,
            recompute_s=price.recompute_s,
            exposed_s=seat.exposed_s(price.recompute_s, self.profile.interference),
            flops=price.flops,
            host=half_host_s(self.profile, section, items, checkpointed=True),
            checkpoint=checkpoint,
        )

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
        return checkpoint._replace(rest_in_wait=may and self._prices.windows_s("bwd", section, ())[0] > 0)

    def begun_anyway(self, sections: tuple[Section, Section], layer: Layer) -> tuple[Option | None, ...]:
        """Return the checkpoints of a layer with communication begun ahead, whatever memory that takes.

        Empty if that saves nothing or is not possible. `sections`: see `begun_ahead`.
        """
        if not self._may_begin(sections):
            return ()
        if (key := (sections, layer)) not in self._known_anyway:
            begun = begun_ahead(self._prices, sections, layer, anyway=True)
            halves = zip(sections, begun, reversed(sections), strict=True)
            options = tuple(checkpoint and self._checkpoint(section, checkpoint, other) for section, checkpoint, other in halves)
            self._known_anyway[key] = () if begun == layer else options
        return self._known_anyway[key]

    @cached_property
    def _known_anyway(self) -> dict[tuple[tuple[Section, Section], Layer], tuple[Option | None, ...]]:
        return {}

    def _begun_at_top(self, kind: HalfKind, option: Option) -> Option:
        """Return a checkpoint that a plan lets begin ahead as it is where no half runs before it."""
        assert option.checkpoint is not None
        option_at_top = self._checkpoint(kind.section, option.checkpoint._replace(ahead_to=None, gathers_ahead=False))
        return replace(option_at_top, checkpoint=option.checkpoint)

    def _begun(self, kind: HalfKind, other: Section, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint of this half, begun ahead if that is worth it; a stage's last MLP half cannot."""
        first = kind.half == HALVES[0]
        if (first and not checkpoint.joined) or (kind.last and not first):
            return checkpoint
        sections = (kind.section, other) if first else (other, kind.section)
        mlp = self._with_rest_in_wait(sections[-1], LAYER[HALVES[1]] if checkpoint.joined else checkpoint)
        layer = (LAYER[HALVES[0]], mlp) if checkpoint.joined else (None, mlp)
        if not self._may_begin(sections):
            return checkpoint
        if (key := (sections, checkpoint.joined)) not in self._known_ahead:
            self._known_ahead[key] = begun_ahead(self._prices, sections, layer)
        return self._known_ahead[key][not first] or checkpoint

    def _may_begin(self, sections: tuple[Section, Section]) -> bool:
        """Whether communication of a layer may begin ahead; beside opaque sections it may not."""
        return not self.job.no_windows and not any(section.kept_whole for section in sections)

    @cached_property
    def _known_ahead(self) -> dict[tuple[tuple[Section, Section], bool], Layer]:
        return {}

    @cached_property
    def _prices(self) -> Prices:
        return Prices(self.profile, self._less_in_hand)

    def _priced(self, subsets: Iterable[Subset]) -> Iterator[Option]:
        """Yield every subset in every seat that is offered to it."""
        attention, _ = self.job.model.kind_sections(experts=False)
        for subset in subsets:
            for seat in self._seats.everywhere(subset.kind, subset.recompute, subset.backward, subset.price):
                yield subset.option(seat, self.profile, attention)

    @cached_property
    def _less_in_hand(self) -> Mapping[Half, int]:
        return less_in_hand_bytes(self.job)

    @cached_property
    def _seats(self) -> Seats:
        return Seats(self.job, self.profile)

    def _recomputations_of(self, section: Section) -> Sequence[tuple[tuple[str, ...], PricedSection, Passes]]:
        """Sets of items of a section that may be recomputed, with their costs, whatever half comes before."""
        if section not in self._known_recomputations:
            self._known_recomputations[section] = tuple(self._recomputations_anew(section))
        return self._known_recomputations[section]

    @cached_property
    def _known_recomputations(self) -> dict[Section, Sequence[tuple[tuple[str, ...], PricedSection, Passes]]]:
        return {}

    def _recomputations_anew(self, section: Section) -> Iterator[tuple[tuple[str, ...], PricedSection, Passes]]:
        whole_inputs = self.job.keeps_gathered or (self.job.parallel.sequence_parallel and not section.has_windows)
        stays = stays_whole(self.job, section)
        shape, tensors = self.profile.shape, self.profile.of(section).tensors
        sliced, te = shape.sequence_parallel, self.job.model.uses_te
        for items in sensible_choices(section, tensors, shape.context, sequence_parallel=sliced, te=te):
            if (stays and items) or asks_host(self.job, section, items):
                continue
            if whole_inputs and section.gathered in items:
                continue  # what owns a userbuffer does not run again, nor what nothing gathers the input for
            price = priced(self.profile, section, items, None, self._less_in_hand.get(section.half, 0))
            if stays:
                price = replace(price, memory=replace(price.memory, movable=0))
            elif self.job.model.moe_overlapped and not section.apart:  # Megatron holds the input of a node
                movable_bytes = price.memory.movable - self.profile.of(section).input_bytes
                price = replace(price, memory=replace(price.memory, movable=max(0, movable_bytes)))
            yield items, price, half_host_s(self.profile, section, items)
