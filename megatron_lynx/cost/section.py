"""Price of one section of a layer under one choice of recomputed items, and of a delayed weight gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from megatron_lynx.anatomy import HALVES, Half, Pass, Section
from megatron_lynx.cost.communication import again_s, kept_gathers_bytes, under_way_s, window_lengths_s
from megatron_lynx.cost.memory import HalfMemory, half_memory
from megatron_lynx.cost.recompute import Checkpoint, recomputation_of
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.once import once as kept
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import BF16_BYTES, cast_bytes

T = TypeVar("T")


class Progress(NamedTuple):
    """Progress of a recomputation from its beginning to an item, or between two of them."""

    seconds: float
    bytes: int
    """Bytes live, including tensors kept to resume and a gathered input."""
    under_way_s: float = 0.0
    """Communication in flight when a checkpoint that runs ahead stops."""
    again_s: float = 0.0
    """Part of `seconds` that runs again on resuming: code between sites."""
    waits_s: float = 0.0
    """Waits for its communication, or for the gather of its input."""


@dataclass(frozen=True)
class PricedSection:
    memory: HalfMemory
    recompute_s: float = 0.0
    """Forward seconds of all that recomputation runs, code on the way included."""
    flops: int = 0
    communicates_s: float = 0.0
    """Exposed communication of a recomputed checkpoint."""
    gathered_bytes: int = 0
    """Buffer of an input gathered once for recomputation and backward."""
    stops: Mapping[str, Progress] = field(default_factory=dict)
    """By item before which recomputation can stop; for a checkpoint recomputed in parts, at which it stops, last first."""


def priced(
    profile: Profile,
    section: Section,
    recompute: Collection[str],
    checkpoint: Checkpoint | None = None,
    less_in_hand_bytes: int = 0,
) -> PricedSection:
    """Price the recomputation of these items. `checkpoint`: of these items, saving at most its input."""
    if checkpoint is not None and (checkpoint.ahead_to is not None or checkpoint.rest_in_wait):
        return _in_parts(profile, section, recompute, checkpoint, less_in_hand_bytes)
    costs, message_bytes = profile.of(section), profile.message_bytes
    recomputed = recomputation_of(section, costs.tensors, recompute, whole=checkpoint is not None and checkpoint.feeds)
    gathered_bytes = kept_bytes = 0
    communicates_s, stops = 0.0, dict[str, Progress]()
    if checkpoint is not None:
        communicates_s = again_s(profile, section, recomputed.runs)
    else:
        gathered_bytes = profile.gathered_input(message_bytes) if gathers(profile, section, recompute) else 0
        kept_bytes = kept_gathers_bytes(profile, section, recompute, message_bytes)
        for stop in section.stops:
            before = (item for item in recomputed.runs if section.index(item) < section.index(stop))
            stops[stop] = Progress(
                sum(costs.items[item].forward_s for item in before), recomputed.there_bytes[stop] + gathered_bytes
            )
    return PricedSection(
        half_memory(section, profile, recomputed, checkpoint, less_in_hand_bytes, gathered_bytes, kept_bytes),
        sum(costs.items[item].forward_s for item in recomputed.runs),
        sum(costs.items[item].flops for item in recomputed.runs if item in recompute),
        communicates_s,
        gathered_bytes,
        stops,
    )


def _in_parts(
    profile: Profile, section: Section, recompute: Collection[str], checkpoint: Checkpoint, less_in_hand_bytes: int
) -> PricedSection:
    """Price a checkpoint recomputed in two parts: to an item, during the backward of the layer above or at the start of its
    backward, and the rest after that. Rows of tokens are counted elsewhere (`stage_memory.dispatched_bytes`)."""
    price = priced(profile, section, recompute, Checkpoint(checkpoint.feeds, checkpoint.fed), less_in_hand_bytes)
    item = checkpoint.ahead_to or section.last_communicating
    assert item is not None, f"nothing of {section.name} communicates"
    if item == section.residual:
        return replace(price, memory=_from_above(price.memory, price.memory.regenerated, checkpoint))
    places = (item, *((section.column_parallel,) if checkpoint.gathers_ahead else ()))
    stops = {place: _begun(profile, section, recompute, checkpoint, place) for place in places}
    exposed_s = price.communicates_s - sum(progress.under_way_s for progress in stops.values())
    stops[item] = stops[item]._replace(waits_s=exposed_s)
    memory = price.memory
    if checkpoint.ahead_to is not None:
        memory = _from_above(memory, max(progress.bytes for progress in stops.values()), checkpoint)
    return replace(price, memory=memory, stops=stops)


def _begun(profile: Profile, section: Section, recompute: Collection[str], checkpoint: Checkpoint, item: str) -> Progress:
    """Return the progress at an item: before it while its input is gathered, else after it."""
    costs, index, gathers = profile.of(section), section.index(item), item == section.gathered
    stop = item if gathers or section.exchanges else section.names[index + 1]
    recomputed = recomputation_of(section, costs.tensors, recompute, whole=checkpoint.feeds, stops=(stop,))
    before = [run for run in recomputed.runs if section.index(run) < index + (not gathers)]
    held_bytes = recomputed.there_bytes[stop] + (costs.input_bytes if checkpoint.fed or (checkpoint.feeds and not gathers) else 0)
    scatters = profile.shape.sequence_parallel and not section.exchanges
    travels = profile.gathered_input(profile.message_bytes) if gathers else profile.message_bytes if scatters else 0
    return Progress(
        sum(costs.items[run].forward_s for run in before),
        held_bytes + travels,
        under_way_s(profile, section, item, gathers=gathers),
        sum(costs.items[run].forward_s for run in before if run in section.code),
    )


def _from_above(memory: HalfMemory, begun_bytes: int, checkpoint: Checkpoint) -> HalfMemory:
    """Add the bytes recomputed in the layer above, whose attention half precedes the MLP half."""
    nearest, *_ = memory.ahead
    before = (nearest, nearest, begun_bytes, begun_bytes) if checkpoint.feeds else (begun_bytes, begun_bytes, 0, 0)
    return replace(memory, ahead=before)


def gathers(profile: Profile, section: Section, recompute: Collection[str]) -> bool:
    """Whether these items include the GEMM whose input is gathered once."""
    return profile.shape.sequence_parallel and section.gathered in recompute


@dataclass(frozen=True)
class Prices:
    profile: Profile
    less_in_hand_bytes: Mapping[Half, int] = field(default_factory=dict)
    """By half, in backward (`cost.moments`); empty if only the layers' own bytes matter."""

    @kept
    def once(self, price: Callable[..., T], /, *where: object, **how: object) -> T:
        return price(self.profile, *where, **how)

    def of(self, section: Section, recompute: Collection[str], checkpoint: Checkpoint | None = None) -> PricedSection:
        return self.once(priced, section, recompute, checkpoint, self.less_in_hand_bytes.get(section.half, 0))

    def windows_s(self, passing: Pass, section: Section, deferred: Collection[str]) -> tuple[float, ...]:
        return self.once(window_lengths_s, passing, section, self.message_bytes, deferred)

    def weight_gradient(self, section: Section, linear: str) -> WeightGradient:
        return self.once(weight_gradient, section, linear)

    @cached_property
    def message_bytes(self) -> int:
        return self.profile.message_bytes


PIECES_SLOWER = 0.07
"""k pieces take k ** PIECES_SLOWER times as long as the whole GEMM: 1.05 and 1.10 for 2 and 4, the medians of 20 shapes on an
H100 with Transformer Engine 2.17."""
COPIED_FLOPS = 800
"""FLOPs of a GEMM in the time in which a byte of its gradient is copied, because kernels want contiguous operands: 730 to 860 for
the larger of these shapes."""


class WeightGradient(NamedTuple):
    seconds: float
    input_bytes: int
    gradient_bytes: int
    most_pieces: int = 1
    copy_s: float = 0.0
    """Seconds to copy its gradient once; 0 for pieces that are experts, which copy nothing."""
    copied_bytes: int = 0
    """Rows of the gradient that a piece copies while it runs."""

    @property
    def bytes(self) -> int:
        return self.input_bytes + self.gradient_bytes

    def cut(self, pieces: int) -> tuple[WeightGradient, ...]:
        """Return its pieces in order. The operands are the last one's."""
        if pieces == 1:
            return (self,)
        slower, copied_bytes = (pieces**PIECES_SLOWER, self.gradient_bytes // pieces) if self.copy_s else (1.0, 0)
        last = self._replace(seconds=(slower * self.seconds + self.copy_s) / pieces, copied_bytes=copied_bytes)
        return (*[last._replace(input_bytes=0, gradient_bytes=0)] * (pieces - 1), last)


def weight_gradient(profile: Profile, section: Section, linear: str) -> WeightGradient:
    """Price a delayed weight gradient: half of a linear's backward FLOPs. It keeps both operands, all rows of each. In FP8
    Transformer Engine may keep a tensor by rows and by columns, a byte each. Experts of a rank count together."""
    item = profile.of(section).items[linear]
    input_bytes, gradient_bytes = planning_of(section).operands_bytes(profile, linear)
    if (recipe := profile.shape.fp8) is not None:
        input_bytes, gradient_bytes = 2 * input_bytes, 2 * cast_bytes(recipe, gradient_bytes // BF16_BYTES)
    seconds, shape = item.wgrad_s or item.backward_s / 2, profile.shape
    if section.of_name[linear].of_experts:
        experts = 1 if shape.experts is None else shape.experts.count // shape.expert
        return WeightGradient(seconds, input_bytes, gradient_bytes, experts)
    with_bias = section.half == HALVES[0] and linear != section.row_parallel  # its GEMM may make the bias gradient, too
    in_pieces = shape.fp8 is None and not with_bias and item.flops > 0
    copy_s = COPIED_FLOPS * gradient_bytes * seconds / item.flops if in_pieces else 0.0
    return WeightGradient(seconds, input_bytes, gradient_bytes, sys.maxsize if in_pieces else 1, copy_s)
