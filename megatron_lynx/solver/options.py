"""Options for one half of a layer: tensors kept, items recomputed and where, and their cost.

    sets of items  ──price──> recomputed on demand, or in waits of the backward    ──> Option, Option, ...
    checkpoints    ──price──> recomputed on demand, in part ahead or in a wait     ──> of the half, and of the layer

Waits ("windows") of a stage's backward in which a half may be recomputed:

    backward, from the last layer      mlp(L) [bwd.mlp.*]       attention(L) [bwd.attention.*]    mlp(L-1) ...
                                       recompute attention(L)   recompute mlp(L-1)                                            [1]
    with sequence parallelism          [bwd.X.0] X ...          a half's own recomputation, before its GEMMs                  [2]

[1] A half is recomputed in the windows of the half before it, in several parts if there are several windows. Bytes recomputed
    before the last of these windows are held while that whole half runs.
[2] `anatomy.in_time` says when that window comes before anything of the half is needed. Each window is offered to one half: to
    the half itself in Megatron's own layers, and to the next half in Transformer Engine's, where it rarely comes in time for the
    half itself.
[3] With expert parallelism the all-to-all that brings gradients to the experts is offered to their own half, which needs its
    recomputed tensors right after it. The all-to-all that returns gradients is offered to the attention half below.

An input that is gathered once for recomputation is gathered after the first collective of the half before. If the recomputation
runs in that half's first window, it is gathered after the first collective one half earlier.

These are not offered: windows of zero length; windows in which an input is gathered; windows of forwards; collectives with
userbuffers or beside overlapped exchanges of experts. Recomputation that communicates runs on demand: in FP8 with one scale for
all ranks' parts of a norm's output, recomputing the norm reduces its amax (rule R2). So does recomputation in a
receive of a gradient: that hides less than 1 % of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from megatron_lynx.anatomy import HALVES, Half, Section, by_layer
from megatron_lynx.anatomy.address import (
    ON_DEMAND,
    Stretch,
    amax_reducing,
    half_before,
    in_words,
    own_waits_in_time,
    own_window,
    resumes_in_wait,
    window_name,
)
from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import loss_bytes
from megatron_lynx.cost.communication import before_core_s, behind_gather_s, gather_lost_and_spared_s, windows_of
from megatron_lynx.cost.host import half_host_s
from megatron_lynx.cost.moments import less_in_hand_bytes
from megatron_lynx.cost.recompute import INSIDE, Checkpoint, sensible_choices
from megatron_lynx.cost.section import PricedSection, Prices, Progress
from megatron_lynx.cost.stage import HalfSeconds, chunks_in_flight, half_seconds, stage_seconds
from megatron_lynx.fp8_recipes import gathers_once
from megatron_lynx.kinds.latent.section import core_kept
from megatron_lynx.once import once
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.solver.problem import Choices, Grouped, Option, StageProblem
from megatron_lynx.timeline import Passes
from megatron_lynx.timetable import ahead_to, may_gather_ahead
from megatron_lynx.units import MIB

Layer = tuple[Checkpoint, Checkpoint]
"""Checkpoints of the attention half and the MLP half of a layer."""


class Wait(NamedTuple):
    """A window of the backward, as a half that is recomputed there sees it."""

    window: str
    """Its name in a plan."""
    seconds: float
    ahead: int = 0
    """Moments before the half's own backward at which it begins (`cost.memory`); 0 for the half's own windows."""


class Part(NamedTuple):
    """Part of a recomputation that runs in a wait."""

    wait: Wait
    seconds: float
    until: str | None = None
    """Item before which it stops; None: all that is left runs."""


Parts = tuple[Part, ...]
"""In order. What is left after the last one runs on demand, when backward asks for the half's first tensor."""


class Gather(NamedTuple):
    """A collective after which the input of a recomputation is gathered once (sequence parallelism)."""

    window: str | None = None
    """The collective's name in a plan; None: the input is not gathered."""
    exposed_s: float = 0.0
    spared_s: float = 0.0
    """Seconds by which the half's backward waits less for its input, because it was gathered before."""
    ahead: int = 0
    """Moments before the half's own backward from which the gathered input is there (`cost.memory`)."""


NO_GATHER = Gather()

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
        layers = by_layer(sections)
        for (attention, mlp), above in zip(layers, (*layers[1:], None), strict=False):
            yield self._offered(attention, mlp, before=mlp, top=above is None)
            yield self._offered(mlp, attention, before=above and above[0], top=above is None)

    @once
    def inside_of(self, section: Section) -> Grouped | None:
        if not may_checkpoint(self.job, section, INSIDE):
            return None
        both = (self._with_rest_in_wait(section, checkpoint) for checkpoint in (LAYER[section.half], INSIDE))
        return Grouped(*(self._checkpoint(section, checkpoint) for checkpoint in both))

    @cached_property
    def seconds(self) -> Mapping[Section, HalfSeconds]:
        return {section: half_seconds(self.profile, section) for section in self.job.model.every_section}

    @cached_property
    def prices(self) -> Prices:
        return Prices(self.profile, less_in_hand_bytes(self.job))

    @once
    def _offered(self, section: Section, other: Section, *, before: Section | None, top: bool) -> Choices:
        """Return all options of a half: sets of recomputed items, then checkpoints.

        other: section of the layer's other half. Beside an opaque one the layer is no checkpoint.
        before: section of the half whose backward comes before; None for a stage's last half.
        top: whether it is in a stage's last layer, where nothing begins ahead, and no half is two halves before.
        """
        above = window_name("bwd", section.half, 0, 1)
        options = [option for option in self._recomputed(section, before) if not (top and option.gather == above)]
        least_bytes = min(option.memory.resident for option in options)
        index, layer = (0, (section, other)) if section.half == HALVES[0] else (1, (other, section))
        for checkpoint in (Checkpoint(), LAYER[section.half]):
            if not may_checkpoint(self.job, section, checkpoint) or (checkpoint.joined and other.kept_whole):
                continue
            ways = [way[index] for way in self._ways(layer, joined=checkpoint.joined, top=top)]
            for way in ways if checkpoint.joined else dict.fromkeys(ways):
                option = self._checkpoint(section, way, layer)
                if option.joined or option.memory.resident < least_bytes:  # one half alone keeps less than every set does
                    options.append(option)
        return Choices(options)

    @once
    def _recomputed(self, section: Section, before: Section | None) -> tuple[Option, ...]:
        """Return all sets of items that may be recomputed, on demand and in all ways in the waits that are offered."""
        options = list[Option]()
        stays, parallel = stays_whole(self.job, section), self.job.parallel
        shape, costs = self.profile.shape, self.profile.of(section)
        whole_inputs = self.job.keeps_gathered or (parallel.sequence_parallel and not section.has_windows)
        sliced, te = shape.sequence_parallel, self.job.model.uses_te
        for items in sensible_choices(section, costs.tensors, shape.context, sequence_parallel=sliced, te=te):
            if (stays and items) or asks_host(self.job, section, items):
                continue
            if whole_inputs and section.gathered in items:
                continue  # a linear with a userbuffer is not recomputed, nor one whose input no collective gathers
            price, host = self.prices.of(section, items), half_host_s(self.profile, section, items)
            movable_bytes = 0 if stays else price.memory.movable
            if self.job.model.moe_overlapped and not section.apart:  # Megatron holds the input of a node
                movable_bytes = max(0, movable_bytes - costs.input_bytes)
            for parts, gather in self._seats(section, before, items, price):
                memory = replace(price.memory, movable=movable_bytes, ahead=_ahead(price, section, parts, gather))
                where, exposed_s = (_window(parts), gather.window), price.recompute_s - self._hidden_s(parts) + gather.exposed_s
                options.append(Option(items, memory, *where, price.recompute_s, exposed_s, gather.spared_s, price.flops, host))
        return tuple(options)

    def _hidden_s(self, parts: Parts) -> float:
        """Return the seconds of recomputation that waits hide. In a wait it takes `interference` times as long."""
        return sum(min(part.seconds, part.wait.seconds / self.profile.interference) for part in parts)

    def _seats(
        self, section: Section, before: Section | None, items: Collection[str], price: PricedSection
    ) -> Iterator[tuple[Parts, Gather]]:
        """Yield the ways to recompute these items, on demand first, then what hides most, each with the gather of their input."""
        model, sliced = self.job.model, self.job.parallel.sequence_parallel
        communicates = amax_reducing(section, items, model.fp8_recipe, sequence_parallel=sliced)
        waits = [*self._waits(section, before, items)] if items and not communicates else []
        in_waits = _parted(waits, self._stops(section, items, price), price.recompute_s)
        ways: list[Parts] = [(), *sorted(in_waits, key=self._hidden_s, reverse=True)]
        if not sliced or section.gathered not in items:
            yield from ((parts, NO_GATHER) for parts in ways)
        elif communicates or not self._collectives_hide or before is None or not before.has_windows:
            yield (), Gather(ON_DEMAND, *self._gather_s(section, None))
        else:
            yield from ((parts, self._gather(section, before, parts)) for parts in ways)

    def _stops(self, section: Section, items: Collection[str], price: PricedSection) -> dict[str, Progress]:
        """Return the items before which a recomputation may stop. Items before a gather run together with it. A norm of
        Transformer Engine would run again with its linear."""
        before_linear = not (self.job.model.uses_te or self.job.parallel.sequence_parallel)
        stops = {name: stop for name, stop in price.stops.items() if 0 < stop.seconds < price.recompute_s}
        return {name: stop for name, stop in stops.items() if name != section.gathered or (before_linear and name in items)}

    def _waits(self, section: Section, before: Section | None, items: Collection[str]) -> Iterator[Wait]:
        """Yield the windows that are offered to these items of a half, in order. [1] [2] [3]"""
        sliced, te = self.job.parallel.sequence_parallel, self.job.model.uses_te
        own_first = sliced and not (te and self._reaches_back)
        in_time = own_waits_in_time(section, items, exchanged=True, sequence_parallel=sliced, te=te)
        _, above = half_before(section.half)
        earlier = [] if before is None else self._windows(before, above, ahead=2)[before.exchanges :]
        own = self._windows(section)[:in_time] if section.exchanges or own_first else []
        yield from (wait for wait in (*(earlier[-1:] if own_first else earlier), *own) if wait.seconds > 0)

    @once
    def _windows(self, section: Section, above: int = 0, *, ahead: int = 0) -> list[Wait]:
        """Return the windows of a half in a backward, some layers above the recomputed half. A gather of an input is no window.
        `ahead`: moments before the recomputed half's backward at which that backward begins."""
        whole = self.job.model.experts_whole or self.job.userbuffers
        hide = not whole if section.exchanges else self._collectives_hide and section.has_windows
        lengths_s = self.prices.windows_s("bwd", section, ()) if hide else ()
        last = len(lengths_s) - 1
        return [
            Wait(window_name("bwd", section.half, ordinal, above), seconds, ahead and ahead - (ordinal == last))
            for ordinal, (seconds, waited) in enumerate(zip(lengths_s, windows_of(self.profile, section, "bwd"), strict=False))
            if waited.carries != "input"
        ]

    def _gather(self, section: Section, before: Section, parts: Parts) -> Gather:
        """Return the gather of a half's input after the first collective of the half before. If the half's recomputation begins
        in that wait, its input is gathered one half earlier."""
        half, above = half_before(section.half)
        first = window_name("bwd", half, 0, above)
        if parts and parts[0].wait.window == first:
            return Gather(window_name("bwd", section.half, 0, 1), *self._gather_s(section, section, whole=True), ahead=4)
        return Gather(first, *self._gather_s(section, before), ahead=2)

    def _gather_s(self, section: Section, behind: Section | None, *, whole: bool = False) -> tuple[float, float]:
        """Return exposed seconds and saved seconds of gathering a half's input after another half's first collective."""
        message_bytes = self.profile.message_bytes
        return self.prices.once(gather_lost_and_spared_s, section, behind, message_bytes, whole=whole)

    @property
    def _collectives_hide(self) -> bool:
        """Whether tensor-parallel collectives are windows (`Job.no_windows`). Beside overlapped exchanges of experts nodes
        of two micro-batches alternate."""
        return not self.job.no_windows and not self.job.model.moe_overlapped

    @cached_property
    def _reaches_back(self) -> bool:
        """Whether an input may be gathered two halves before: if neither may be experts or opaque."""
        return self.job.model.experts is None and not (self.job.model.opaque or self.job.model.captured)

    def _checkpoint(self, section: Section, checkpoint: Checkpoint, layer: tuple[Section, Section] | None = None) -> Option:
        """Return the option of a checkpoint. `layer`: sections of its layer, if it may begin ahead."""
        items = checkpoint.items(section)
        price, window = self.prices.of(section, items, checkpoint), None
        exposed_s = price.recompute_s + price.communicates_s
        if layer is not None and checkpoint.ahead_to is not None:
            exposed_s -= self._spared_s(price, checkpoint, *layer)
        if checkpoint.rest_in_wait:
            window, (begun,) = own_window(section.half), price.stops.values()
            window_s, *_ = self.prices.windows_s("bwd", section, ())
            rest_s = price.recompute_s - begun.seconds + begun.again_s
            exposed_s += (0.0 if checkpoint.ahead_to else begun.again_s) - min(rest_s, window_s / self.profile.interference)
        host = half_host_s(self.profile, section, items, checkpointed=True)
        return Option(items, price.memory, window, None, price.recompute_s, exposed_s, 0.0, price.flops, host, checkpoint)

    def _spared_s(self, price: PricedSection, checkpoint: Checkpoint, attention: Section, mlp: Section) -> float:
        """Return the seconds that a checkpoint saves because its communication runs during the attention backward of the layer
        above, which has the same sections.

        Tokens travel during that whole attention backward. With sequence parallelism a reduction travels between two gathers.
        After a gather, communication starts at the core attention.
        """
        between_gathers = self.profile.shape.sequence_parallel and not mlp.exchanges
        computes_s = behind_gather_s(self.profile, attention) if between_gathers else self.profile.of(attention).backward_s
        before_s = before_core_s(self.profile, attention) if checkpoint.gathers_ahead else 0.0
        return sum(
            min(begun.under_way_s / self.profile.interference, computes_s - before_s if item == checkpoint.ahead_to else before_s)
            - begun.again_s
            for item, begun in price.stops.items()
        )

    @once
    def _ways(self, layer: tuple[Section, Section], *, joined: bool, top: bool) -> tuple[Layer, ...]:
        """Return both halves' checkpoints as they are, then with a dispatch or a reduction ahead, then with the gather before it
        ahead as well, as far as possible. `joined`: of a checkpointed layer."""
        attention, mlp = layer
        first, second = LAYER.values() if joined else (Checkpoint(), Checkpoint())
        late = first, self._with_rest_in_wait(mlp, second)
        if top or self.job.no_windows or attention.kept_whole or mlp.kept_whole:
            return (late,)
        first, second = (
            half._replace(ahead_to=ahead_to(section, experts=mlp.exchanges, feeds=half.feeds))
            for section, half in zip(layer, late, strict=True)
        )
        ways, shape = [late, (first, second)], self.profile.shape
        gathers = shape.sequence_parallel and shape.tensor > 1 and gathers_once(shape.fp8)
        if gathers and may_gather_ahead(attention, experts=mlp.exchanges, feeds=first.feeds):
            ways.append((first._replace(gathers_ahead=True), second))
        return tuple(dict.fromkeys(ways))

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


def _parted(waits: Sequence[Wait], stops: Mapping[str, Progress], recompute_s: float, done_s: float = 0.0) -> Iterator[Parts]:
    """Yield every way to run the rest of a recomputation in these waits, in order: in one wait, or part by part."""
    for later, wait in enumerate(waits, start=1):
        yield (Part(wait, recompute_s - done_s),)
        for name, stop in stops.items():
            if stop.seconds > done_s:
                rests = _parted(waits[later:], stops, recompute_s, stop.seconds)
                yield from ((Part(wait, stop.seconds - done_s, name), *rest) for rest in chain([()], rests))


def _window(parts: Parts) -> str | None:
    """Return the parts as a plan names them; None: all on demand."""
    rest = [Stretch(ON_DEMAND)] if parts and parts[-1].until else []
    return in_words((*(Stretch(part.wait.window, part.until) for part in parts), *rest)) if parts else None


def _ahead(price: PricedSection, section: Section, parts: Parts, gather: Gather) -> tuple[int, ...]:
    """Return the bytes recomputed or gathered before a half's own backward, at the four moments of `HalfMemory.ahead`.

    windows of       attention(3)        mlp(2): the half before    attention(2): the half itself
                     [A]       [B]       [A]       [B]              [A]
    recomputed       ahead[3]  ahead[2]  ahead[1]  ahead[0]         whole ... until the half's own backward ends
    """
    held = [(gather.ahead, price.stops[section.column_parallel].bytes)] if gather.ahead else []
    held += [(part.wait.ahead, price.stops[part.until].bytes if part.until else price.memory.regenerated) for part in parts]
    bytes_ahead = [0] * len(price.memory.ahead)
    for ahead, size in held:
        bytes_ahead[:ahead] = [size] * ahead
    return tuple(bytes_ahead)


@dataclass(frozen=True)
class StageProblems:
    job: Job
    options: HalfOptions
    """Those of the same job; its stages may have other layers."""

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
