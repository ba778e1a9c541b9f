"""Cached prices of the halves of a plan, since most layers are treated alike, and of delayed weight gradients.

Each GEMM of a linear's backward is half of its FLOPs. A delayed weight gradient keeps its two operands, all rows of both: the
total input (gathered, with sequence parallelism) and the gradient of the output. In FP8 Transformer Engine may keep a tensor by
rows and by columns, a byte each. Experts of a rank count together, under the assumed load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from megatron_lynx.anatomy import HALVES, Half, Pass, Section
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.recompute import Checkpoint
from megatron_lynx.cost.section import PricedSection, priced
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import BF16_BYTES, cast_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Prices:
    profile: Profile
    less_in_hand_bytes: Mapping[Half, int] = field(default_factory=dict)
    """By half, in backward (`cost.in_hand`); empty if only the layers' own bytes matter."""
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def once(self, price: Callable[..., T], *where: object, **how: object) -> T:
        key = price, where, *how.values()
        if key not in self._known:
            self._known[key] = price(self.profile, *where, **how)
        result: T = self._known[key]
        return result

    def of(self, section: Section, recompute: Collection[str], checkpoint: Checkpoint | None = None) -> PricedSection:
        return self.once(priced, section, recompute, checkpoint, self.less_in_hand_bytes.get(section.half, 0))

    def windows_s(self, passing: Pass, section: Section, deferred: Collection[str]) -> tuple[float, ...]:
        """Return the windows of a half in one pass. `deferred`: linears with delayed weight gradients."""
        return self.once(window_lengths_s, passing, section, self.message_bytes, deferred)

    def weight_gradient(self, section: Section, linear: str) -> WeightGradient:
        return self.once(weight_gradient, section, linear)

    @cached_property
    def text(self) -> str:
        return f"{self.profile.model_dump_json()} {dict(self.less_in_hand_bytes)}"

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
    """One linear's, or a piece of it, for one micro-batch."""

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
