"""How long one micro-batch takes in a layer under a stock setting: each half forward, backward, and what runs again before it;
and the copies of a stage that offloads.

What a checkpoint runs again waits for its collectives again.

Copies under fine-grained offloading, layer by layer, as stock Megatron asks for them:

    compute      F ├ 1 ├ 2 ├ 3 ┤  ...  B ├─ 3 ─┼─ 2 ─┼─ 1 ─┤  B' ├─ 3 ─┼ ...
    to the host        └1─┘└2─┘└3─┘ [1]
    back                                  └2┘[2] └1┘    └3'┘ [3]

 [1] what a layer's modules saved is copied when they are over; the originals are there until then
 [2] the backward of a layer's attention asks for the layer below, and waits for its own: one layer ahead
 [3] the last one asks for the top layer of the next backward, if its forward is over
 [4] a micro-batch whose backward follows its forward keeps its top layer; so does the first backward of a step
 [5] where whole layers are recomputed as well, Megatron loses its place: everything comes back where it is read, and what a layer
     makes again goes out and comes back once more (counted on CPU ranks). On a GPU it does not even wait for the way out, so that
     what it reads may not be there yet; here it does
 [6] a blocking exchange between stages ends in a synchronisation of the device, which waits for all copies asked for

A stage's passes follow each other without gaps here: in a full pipeline the slowest stage has none. Where there are gaps, copies
have more time than this. Copies do not slow compute or messages down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_lynx.anatomy import LayerKind, Section
from megatron_lynx.cost.combined import HalfSeconds, LayerSeconds, half_seconds
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.kinds.experts.section import BESIDE, DISPATCH, SHARED_FC1
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.schedule import Action, Phase
from megatron_lynx.stock.layer_bytes import expert_treatment, norm_out_bytes, treatment
from megatron_lynx.stock.setting import StockSetting

NORM_OUT_MOVED = 2.5
"""Bytes that recomputing a gated norm reads and writes, over those that it frees: result, normed result twice, gate and product
against two of them. It is taken to be as fast, byte for byte, as the norm before the half."""


def layer_seconds(shape: LayerShape, profile: Profile, setting: StockSetting, kind: LayerKind | None = None) -> LayerSeconds:
    """A layer whose modules are recomputed. `kind`: of layer; None: a usual one."""
    sections = kind or shape.model.kind_sections(experts=False)
    return tuple(_half(shape, profile, setting, section) for section in sections)


def _half(shape: LayerShape, profile: Profile, setting: StockSetting, section: Section) -> HalfSeconds:
    kept = half_seconds(profile, section)
    if section.opaque:
        moved = NORM_OUT_MOVED * norm_out_bytes(shape, setting, section)
        again_s = profile.of(section).items[section.norm].forward_s * moved / (2 * shape.input_bytes) if moved else 0.0
        return replace(kept, again_s=again_s)
    if section.in_some_layers:
        return replace(kept, again_s=_experts_again_s(shape, profile, setting))
    return replace(kept, again_s=_again_s(shape, profile, setting, section))


def recomputed_whole(layer: LayerSeconds) -> LayerSeconds:
    """The layer in one checkpoint."""
    return tuple(half.recomputed_whole for half in layer)


def _again_s(shape: LayerShape, profile: Profile, setting: StockSetting, section: Section) -> float:
    """Seconds of what a dense half runs again."""
    runs = treatment(shape, setting, section).runs
    again_s = sum(profile.half(section.half).items[name].forward_s for name in runs)
    if section.row_parallel in runs:
        again_s += sum(window_lengths_s(profile, "fwd", section, shape.gathered_bytes))
    return again_s


def _experts_again_s(shape: LayerShape, profile: Profile, setting: StockSetting) -> float:
    """What is run again with `moe` exchanges its rows again, and with shared experts waits for their collectives."""
    assert profile.experts is not None, "a profile of such a layer has its figures"
    own, half = expert_treatment(shape, setting), profile.experts
    again_s = sum(half.items[name].forward_s for name in own.runs)
    again_s += 2 * (half.exchange_s + half.cut_s) * (DISPATCH in own.runs) + 2 * half.collective_s * (SHARED_FC1 in own.runs)
    return again_s - (sum(half.beside_s("fwd", role) for role in BESIDE) if DISPATCH in own.runs else 0.0)


class CopiedLayer(NamedTuple):
    """One micro-batch in one layer."""

    forward_s: float
    backward_s: tuple[float, float]
    """Up to where its attention's backward begins, and from there on."""
    copy_s: float = 0.0
    """One way."""
    leaves: int = 0
    """Bytes that are not on the device in between."""
    copied: int = 0
    """Bytes that come back into blocks of their own."""


@dataclass
class StageCopies:
    """What the passes of one stage take, copies included, and what of the copied tensors is on the device."""

    chunks: Sequence[Sequence[CopiedLayer]]
    exchange_s: float | None
    """Seconds of a blocking exchange between stages, in which the device is synchronised; None: there is none."""
    ahead: bool = True
    """Whether tensors come back one layer ahead."""
    seconds: dict[tuple[str, int, Phase], float] = field(default_factory=dict)
    """By kind of pass, chunk and phase: of the last such pass that was walked."""
    _now_s: float = 0.0
    _out_free_s: float = 0.0
    _back_free_s: float = 0.0
    _out_end_s: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _back_end_s: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _held: dict[tuple[int, int, int], int] = field(default_factory=dict)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def walk(self, actions: Sequence[tuple[Action, Phase]]) -> None:
        """Runs the passes of a stage in order."""
        order = [action for action, _ in actions]
        first = next((action for action in order if action.kind == "B"), None)
        for at, (action, phase) in enumerate(actions):
            begin_s = self._now_s
            if action.kind == "F":
                behind = order[at + 1] if at + 1 < len(order) else None
                own = behind is not None and behind == Action(action.micro_batch, "B", action.chunk)
                keeps_top = own or (first is not None and first == Action(action.micro_batch, "B", action.chunk))
                self._forward(action, keeps_top)
            else:
                self._backward(action, next((each for each in order[at + 1 :] if each.kind == "B"), None))
            if self.exchange_s is not None:  # [6]
                self._now_s = max(self._now_s, max(self._out_free_s, self._back_free_s) - self.exchange_s)
            self.seconds[action.kind, action.chunk, phase] = self._now_s - begin_s

    def most_bytes(self) -> int:
        """The most that is on the device at once of what leaves it."""
        held = most = 0
        for _, change in sorted(self._changes):
            held += change
            most = max(most, held)
        return most

    def _forward(self, action: Action, keeps_top: bool) -> None:
        layers = self.chunks[action.chunk]
        for at, layer in enumerate(layers):
            self._now_s += layer.forward_s
            if not layer.copied:
                continue
            self._changes.append((self._now_s, layer.leaves))
            if at == len(layers) - 1 and keeps_top and self.ahead:  # [4]
                continue
            self._out_free_s = max(self._now_s, self._out_free_s) + layer.copy_s  # [1]
            self._changes.append((self._out_free_s, -layer.leaves))
            self._out_end_s[action.micro_batch, action.chunk, at] = self._out_free_s

    def _backward(self, action: Action, next_backward: Action | None) -> None:
        layers = self.chunks[action.chunk]
        for at in reversed(range(len(layers))):
            before_s, rest_s = layers[at].backward_s
            place = action.micro_batch, action.chunk, at
            self._now_s = max(self._now_s + before_s, self._back_end_s.pop(place, 0.0))  # [2]
            if place in self._out_end_s:  # nobody asked for it ahead [5]
                self._reload(action, at)
                self._now_s = max(self._now_s, self._back_end_s.pop(place))
            if self.ahead:
                self._ask_for_next(action, at, next_backward)
            self._now_s += rest_s
            if layers[at].copied:
                self._changes.append((self._now_s, -self._held.pop(place, layers[at].leaves)))

    def _ask_for_next(self, action: Action, at: int, next_backward: Action | None) -> None:
        """For the layer whose backward comes next."""
        if at:
            self._reload(action, at - 1)
        elif next_backward is not None:
            self._reload(next_backward, len(self.chunks[next_backward.chunk]) - 1)  # [3]

    def _reload(self, backward: Action, at: int) -> None:
        """Ask for the tensors of a layer, if they are in host memory or on their way there."""
        place = backward.micro_batch, backward.chunk, at
        out_end_s = self._out_end_s.pop(place, None)
        if out_end_s is None:
            return
        layer = self.chunks[backward.chunk][at]
        start_s = max(self._now_s, self._back_free_s, out_end_s)
        self._back_free_s = self._back_end_s[place] = start_s + layer.copy_s
        self._changes.append((start_s, layer.copied))
        self._held[place] = layer.copied
