"""Seconds of one micro-batch in a layer under a stock setting, and copies of a stage that offloads.

A checkpoint's recomputation repeats its collectives.

Copies of stock Megatron's fine-grained offloading, layer by layer:

    compute      F ├ 1 ├ 2 ├ 3 ┤  ...  B ├─ 3 ─┼─ 2 ─┼─ 1 ─┤  B' ├─ 3 ─┼ ...
    to the host        └1─┘└2─┘└3─┘
    back                                  └2┘    └1┘    └3'┘

A layer's saved tensors are copied after its modules' forward, and stay on the device until the copy is complete. The backward of
a layer's attention reloads the layer below and waits for its own; the last one reloads the top layer of the next backward, if its
forward has run. A micro-batch whose backward follows its forward keeps its top layer, and so does the first backward of a step.

If whole layers are recomputed as well, Megatron loses its place: each tensor is reloaded where it is read, and recomputed tensors
are offloaded and reloaded once more (counted on CPU ranks). On a GPU Megatron does not wait for the copy out, and may read
incomplete data; this simulation waits.

A blocking exchange between stages ends in a device synchronisation, which waits for all copies.

Passes of a stage are assumed to follow each other without gaps, as on the slowest stage of a full pipeline. Copies do not slow
compute or messages down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_lynx.anatomy import LayerKind, Section
from megatron_lynx.cost.combined import LayerSeconds
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.stage import HalfSeconds, half_seconds
from megatron_lynx.kinds.experts.section import BESIDE, DISPATCH, SHARED_FC1
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.schedule import Action, Phase
from megatron_lynx.stock.layer_bytes import treatment
from megatron_lynx.stock.setting import StockSetting


def layer_seconds(shape: LayerShape, profile: Profile, setting: StockSetting, kind: LayerKind | None = None) -> LayerSeconds:
    """Return a layer's seconds with modules recomputed. `kind`: the layer's, or None for a usual one."""
    sections = kind or shape.model.kind_sections(experts=False)
    return tuple(_half(shape, profile, setting, section) for section in sections)


def _half(shape: LayerShape, profile: Profile, setting: StockSetting, section: Section) -> HalfSeconds:
    again_s = _experts_again_s if section.exchanges else _again_s
    return replace(half_seconds(profile, section), again_s=again_s(shape, profile, setting, section))


def _again_s(shape: LayerShape, profile: Profile, setting: StockSetting, section: Section) -> float:
    if section.opaque:
        return 0.0
    runs = treatment(shape, setting, section).runs
    again_s = sum(profile.of(section).items[name].forward_s for name in runs)
    if section.row_parallel in runs:
        again_s += sum(window_lengths_s(profile, "fwd", section, shape.gathered_bytes))
    return again_s


def _experts_again_s(shape: LayerShape, profile: Profile, setting: StockSetting, section: Section) -> float:
    """Seconds of recomputation in an expert half. `moe` repeats the exchange of rows, and shared experts repeat their
    collectives."""
    assert profile.experts is not None, "a profile of such a layer has its figures"
    runs, half = treatment(shape, setting, section).runs, profile.experts
    again_s = sum(half.items[name].forward_s for name in runs)
    again_s += 2 * (half.exchange_s + half.cut_s) * (DISPATCH in runs) + 2 * half.collective_s * (SHARED_FC1 in runs)
    return again_s - (sum(half.beside_s("fwd", role) for role in BESIDE) if DISPATCH in runs else 0.0)


class CopiedLayer(NamedTuple):
    forward_s: float
    backward_s: tuple[float, float]
    """Up to the beginning of its attention's backward, and from there on."""
    copy_s: float = 0.0
    """In one direction."""
    leaves: int = 0
    """Bytes not on the device between forward and backward."""
    copied: int = 0
    """Bytes reloaded, into new blocks."""


@dataclass
class StageCopies:
    """Seconds of a stage's passes with copies, and device bytes of the copied tensors."""

    chunks: Sequence[Sequence[CopiedLayer]]
    exchange_s: float | None
    """Seconds of a blocking exchange between stages, which synchronises the device; None without one."""
    ahead: bool = True
    """Whether tensors are reloaded one layer ahead."""
    seconds: dict[tuple[str, int, Phase], float] = field(default_factory=dict)
    """By kind of pass, chunk and phase: seconds of the last such pass."""
    _now_s: float = 0.0
    _out_free_s: float = 0.0
    _back_free_s: float = 0.0
    _out_end_s: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _back_end_s: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _held: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def walk(self, actions: Sequence[tuple[Action, Phase]]) -> None:
        order = [action for action, _ in actions]
        first = next((action for action in order if action.kind == "B"), None)
        for at, (action, phase) in enumerate(actions):
            begin_s = self._now_s
            if action.kind == "F":
                behind = order[at + 1] if at + 1 < len(order) else None
                backward_follows = behind is not None and behind == Action(action.micro_batch, "B", action.chunk)
                keeps_top = backward_follows or (first is not None and first == Action(action.micro_batch, "B", action.chunk))
                self._forward(action, keeps_top)
            else:
                self._backward(action, next((later_action for later_action in order[at + 1 :] if later_action.kind == "B"), None))
            if self.exchange_s is not None:  # device synchronisation
                self._now_s = max(self._now_s, max(self._out_free_s, self._back_free_s) - self.exchange_s)
            self.seconds[action.kind, action.chunk, phase] = self._now_s - begin_s

    def most_bytes(self) -> int:
        """Peak device bytes of tensors that are offloaded."""
        held_bytes = peak_bytes = 0
        for _, change in sorted(self._changes):
            held_bytes += change
            peak_bytes = max(peak_bytes, held_bytes)
        return peak_bytes

    def _forward(self, action: Action, keeps_top: bool) -> None:
        layers = self.chunks[action.chunk]
        for at, layer in enumerate(layers):
            self._now_s += layer.forward_s
            if not layer.copied:
                continue
            self._changes.append((self._now_s, layer.leaves))
            if at == len(layers) - 1 and keeps_top and self.ahead:  # the top layer is not offloaded
                continue
            self._out_free_s = max(self._now_s, self._out_free_s) + layer.copy_s
            self._changes.append((self._out_free_s, -layer.leaves))
            self._out_end_s[action.micro_batch, action.chunk, at] = self._out_free_s

    def _backward(self, action: Action, next_backward: Action | None) -> None:
        layers = self.chunks[action.chunk]
        for at in reversed(range(len(layers))):
            before_s, rest_s = layers[at].backward_s
            place = action.micro_batch, action.chunk, at
            self._now_s = max(self._now_s + before_s, self._back_end_s.pop(place, 0.0))
            if place in self._out_end_s:  # not reloaded ahead
                self._reload(action, at)
                self._now_s = max(self._now_s, self._back_end_s.pop(place))
            if self.ahead and at:
                self._reload(action, at - 1)
            elif self.ahead and next_backward is not None:
                self._reload(next_backward, len(self.chunks[next_backward.chunk]) - 1)  # its top layer
            self._now_s += rest_s
            if layers[at].copied:
                self._changes.append((self._now_s, -self._held.pop(place, layers[at].leaves)))

    def _reload(self, backward: Action, at: int) -> None:
        """Reload a layer's tensors, if they are in host memory or in flight to it."""
        place = backward.micro_batch, backward.chunk, at
        out_end_s = self._out_end_s.pop(place, None)
        if out_end_s is None:
            return
        layer = self.chunks[backward.chunk][at]
        start_s = max(self._now_s, self._back_free_s, out_end_s)
        self._back_free_s = self._back_end_s[place] = start_s + layer.copy_s
        self._changes.append((start_s, layer.copied))
        self._held[place] = layer.copied
