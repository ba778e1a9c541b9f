"""One stage under a stock setting: the passes of its chunks, and its device bytes at each moment.

The layers of one chunk, in order:

block 2 of 4       [input]  [input]  [ whole layer ]  [ whole layer ]
uniform 2 of 4     [input      ·   ]  [input      ·   ]         one checkpoint for two layers
half offloaded     [ ─────> host   ]  [ ─────> host   ]  [ stays ]  [ stays ]

With overlapped exchanges a forward and a backward run as one, layer by layer (`combined`). Together they hold the layers of one
chunk and one more, which the forward allocates before the backward frees its own. Both have rows in flight.

Copies of stock Megatron's fine-grained offloading, layer by layer:

    compute      F ├ 1 ├ 2 ├ 3 ┤  ...  B ├─ 3 ─┼─ 2 ─┼─ 1 ─┤  B' ├─ 3 ─┼ ...
    to the host        └1─┘└2─┘└3─┘
    back                                  └2┘    └1┘    └3'┘

The backward of a layer's attention reloads the layer below and waits for its own; the last one reloads the top layer of the next
backward, if its forward has run. A micro-batch whose backward follows its forward keeps its top layer, and so does the first
backward of a step. If whole layers are recomputed as well, Megatron reloads each tensor where it is read, and offloads recomputed
tensors once more (counted on CPU ranks). Passes follow each other without gaps, as on the slowest stage of a full pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from megatron_lynx.anatomy import LayerKind
from megatron_lynx.config.cluster import Setting
from megatron_lynx.config.job import Job
from megatron_lynx.cost.combined import LayerSeconds, Nodes, nodes_of, paired_s, shared_rates
from megatron_lynx.cost.ends import ends_of, logits_gradient_bytes
from megatron_lynx.cost.host import stage_host_s
from megatron_lynx.cost.moments import Parts
from megatron_lynx.cost.stage import most_in_flight_bytes
from megatron_lynx.cost.stage_memory import activations_in_flight, dispatched_bytes, parts_beside_layers, without_overlap
from megatron_lynx.profiler.profile import BlockProfile, Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.schedule import Action, ActionKind, Phase, Schedule
from megatron_lynx.simulator.passes import NOTHING, PHASES, ChunkPasses, HostCopies, TimedPass, in_phases
from megatron_lynx.stock.layer import HalfBytes, LayerBytes, layer_bytes, layer_seconds
from megatron_lynx.stock.setting import NONE, StockSetting
from megatron_lynx.timeline import Passes


def deferred_heads(job: Job, setting: StockSetting) -> int:
    """Number of micro-batches whose head weight gradients run at the end of the step."""
    return 0 if setting.head is None else min(setting.head or job.microbatches, job.microbatches)


class _OfAllSettings(NamedTuple):
    """Facts that all settings of a job share. Exchanges are overlapped by a setting, not the job. `counted`: the job with the
    buffers and pools of its CUDA graphs. `kinds`: by stage and chunk."""

    job: Job
    shape: LayerShape
    counted: Job
    kinds: list[list[tuple[LayerKind, ...]]]


@lru_cache(maxsize=8)
def _of_all_settings(given: Job) -> _OfAllSettings:
    job = without_overlap(given).with_captured(())
    counted = job.model_copy(update={"policy": "none", "head": None}).with_captured(given.model.captured)
    stages, chunks = range(job.parallel.pipeline), range(job.chunks)
    kinds = [[tuple(job.model.each_kind(job.layers_of(stage, chunk))) for chunk in chunks] for stage in stages]
    return _OfAllSettings(job, LayerShape.of(job), counted, kinds)


@dataclass(frozen=True)
class StockStage:
    given: Job
    setting: StockSetting
    stage: int

    @cached_property
    def of_job(self) -> _OfAllSettings:
        return _of_all_settings(self.given)

    @property
    def job(self) -> Job:
        return self.of_job.job

    @cached_property
    def chunks(self) -> tuple[tuple[StockLayer, ...], ...]:
        return tuple(
            chunk_layers(self.of_job.shape, self.setting, kinds, first=(self.stage, chunk) == (0, 0))
            for chunk, kinds in enumerate(self.of_job.kinds[self.stage])
        )

    @cached_property
    def parts(self) -> Parts:
        job, stage, setting, shape = self.job, self.stage, self.setting, self.of_job.shape
        whole = not setting.recompute
        parts = parts_beside_layers(self.of_job.counted, stage, layer_whole=whole, overlapped=setting.overlap)
        if setting.overlap:
            parts = parts.more("backward", self._pair_more_bytes)
        stays = [sum(layer.bytes.stays for layer in chunk) for chunk in self.chunks]
        deferred = deferred_heads(job, setting) if stage == job.parallel.pipeline - 1 else 0
        head_bytes = deferred * (shape.input_bytes + logits_gradient_bytes(shape))  # until the end of the step
        activations = activations_in_flight(job, stage, stays, head_bytes)
        return replace(parts, **activations, recomputed=max(map(recomputed_bytes, self.chunks)))

    @property
    def _pair_more_bytes(self) -> int:
        """Most bytes that the two chunks of a pair hold beyond one."""
        layers = [layer for chunk in self.chunks for layer in chunk]
        rows = dispatched_bytes(self.of_job.shape) if any(layer.kind[1].exchanges for layer in layers) else 0
        return max((layer.bytes.stays for layer in layers), default=0) + rows

    @property
    def host_bytes(self) -> int:
        """Page-locked host memory: each chunk in flight has its own."""
        return most_in_flight_bytes(self.job, self.stage, [sum(layer.bytes.copied for layer in chunk) for chunk in self.chunks])


@dataclass(frozen=True)
class TimedStage(StockStage):
    """A stage with seconds from a profile. `schedule`: the passes for which its copies are simulated."""

    profile: Profile
    schedule: Schedule

    @cached_property
    def parts(self) -> Parts:
        return replace(super().parts, staging=self._with_copies[1])

    @cached_property
    def _with_copies(self) -> tuple[WalkedSeconds, int]:
        if not any(layer.copied for chunk in self._layers for layer in chunk):
            return {}, 0
        blocking = self.schedule.blocking and self.schedule.pipeline > 1
        exchange_s = self.profile.link_s("p2p", self.of_job.shape.input_bytes) if blocking else None
        return with_copies(self._layers, [*self.schedule.phases(self.stage)], exchange_s, ahead=self.setting.method is None)

    @cached_property
    def passes(self) -> list[ChunkPasses]:
        """Passes of each chunk. Host time is that of the closest setting for which it is known."""
        measured: Setting = "full" if self.setting.method == "uniform" else "none"
        host = stage_host_s(self.job, self.profile, self.stage, measured) * (1 / self.job.chunks)
        return [ChunkPasses(in_phases(self._chunk_passes(chunk, host))) for chunk in range(self.job.chunks)]

    def _chunk_passes(self, chunk: int, host: Passes) -> dict[tuple[ActionKind, Phase], TimedPass]:
        """With overlapped exchanges a steady forward is the pair with a backward, which then takes no time."""
        layers, (walked_s, _) = self._layers[chunk], self._with_copies
        ways: tuple[tuple[ActionKind, float, float], ...] = (
            ("F", host.forward_s, sum(layer.forward_s for layer in layers)),
            ("B", host.backward_s, sum(layer.before_s + layer.rest_s for layer in layers)),
        )
        passes = {
            (kind, phase): TimedPass(walked_s.get((kind, chunk, phase), plain_s)).issued_in(host_s)
            for kind, host_s, plain_s in ways
            for phase in PHASES
        }
        if not self.setting.overlap:
            return passes
        return passes | {("F", "steady"): TimedPass(self._pair_s(chunk)).issued_in(host.both_s), ("B", "steady"): NOTHING}

    def _pair_s(self, chunk: int) -> float:
        """Seconds of a chunk's forward with a backward, in the mean over the stage's chunks. Copies overlap with the pair, which
        waits for longer ones."""
        job, beside = self.job, shared_rates(self.profile, self.job.fused_dispatch.computing_kept)
        both_s = 0.0
        for other in range(job.chunks):
            ends_s = sum(end.forward_s for end in self._ends(chunk)) + sum(end.backward_s for end in self._ends(other))
            nodes_s = paired_s(self._nodes[chunk], self._nodes[other], beside, delayed=self.setting.delayed)
            copies_s = max(sum(layer.copy_s for layer in self._layers[which]) for which in (chunk, other))
            both_s += max(nodes_s + ends_s, copies_s) / job.chunks
        return both_s

    @cached_property
    def _seconds(self) -> dict[LayerKind, LayerSeconds]:
        shape, kinds = self.of_job.shape, {layer.kind for chunk in self.chunks for layer in chunk}
        return {kind: layer_seconds(shape, self.profile, self.setting, kind) for kind in kinds}

    @cached_property
    def _nodes(self) -> list[tuple[Nodes, ...]]:
        known = {kind: nodes_of(self.profile, seconds, kind) for kind, seconds in self._seconds.items()}
        return [tuple(known[layer.kind] for layer in chunk) for chunk in self.chunks]

    def _ends(self, chunk: int) -> tuple[BlockProfile, BlockProfile]:
        job, place = self.job, (self.stage, chunk)
        last = place == (job.parallel.pipeline - 1, job.chunks - 1)
        return ends_of(self.profile, self.of_job.shape.gathered_bytes, first=place == (0, 0), last=last)

    @cached_property
    def _layers(self) -> list[list[CopiedLayer]]:
        """By chunk, with embedding and output layer."""
        timed = [[self._timed_layer(layer) for layer in layers] or [CopiedLayer()] for layers in self.chunks]
        for chunk, layers in enumerate(timed):
            first, last = self._ends(chunk)
            bottom = layers[0]
            layers[0] = bottom._replace(forward_s=bottom.forward_s + first.forward_s, rest_s=bottom.rest_s + first.backward_s)
            top = layers[-1]
            layers[-1] = top._replace(forward_s=top.forward_s + last.forward_s, before_s=top.before_s + last.backward_s)
        return timed

    def _timed_layer(self, layer: StockLayer) -> CopiedLayer:
        attention, mlp = self._seconds[layer.kind]
        forward_s, copied = attention.forward_s + mlp.forward_s, layer.bytes.copied
        mlp_again_s, attention_again_s = mlp.again_s, attention.again_s
        if layer.whole:  # recomputed tensors are copied in both directions
            halves = layer_bytes(self.of_job.shape, self.setting, layer.kind) if self.setting.offload else ()
            again_bytes = sum(half.copied for half in halves)
            mlp_again_s = forward_s + (2 * self.profile.link_s("host", again_bytes) if halves else 0.0)
            attention_again_s = 0.0
        before_s, rest_s = mlp_again_s + mlp.backward_s, attention_again_s + attention.backward_s
        copy_s = self.profile.link_s("host", copied) if copied else 0.0
        return CopiedLayer(forward_s, before_s, rest_s, copy_s, layer.bytes.leaves, copied)


class CopiedLayer(NamedTuple):
    """A layer's seconds; backward, up to its attention's backward, and from there on."""

    forward_s: float = 0.0
    before_s: float = 0.0
    rest_s: float = 0.0
    copy_s: float = 0.0
    """In one direction."""
    leaves: int = 0
    """Bytes not on the device between forward and backward."""
    copied: int = 0
    """Bytes reloaded, into new blocks."""


WalkedSeconds = Mapping[tuple[ActionKind, int, Phase], float]
"""By kind of pass, chunk and phase: seconds of the last such pass."""


def with_copies(
    chunks: Sequence[Sequence[CopiedLayer]],
    actions: Sequence[tuple[Action, Phase]],
    exchange_s: float | None = None,
    *,
    ahead: bool = True,
) -> tuple[WalkedSeconds, int]:
    """Return a stage's seconds with copies, and the most bytes of the copied tensors on its device.

    `exchange_s`: seconds of a blocking exchange between stages, which synchronises the device; None without one. `ahead`: whether
    tensors are reloaded one layer ahead.
    """
    order = [action for action, _ in actions]
    backwards = [action for action in order if action.kind == "B"]
    behind, next_backward = dict(pairwise(order)), dict(pairwise(backwards))
    copies, now_s, seconds = HostCopies(), 0.0, dict[tuple[ActionKind, int, Phase], float]()
    changes: list[tuple[float, int]] = []  # (time, bytes that passes allocate or free)

    def reload(backward: Action, at: int) -> None:
        layer = chunks[backward.chunk][at]
        copies.reload(backward, now_s, layer.copy_s, layer.copied, at)

    for action, phase in actions:
        begin_s, layers = now_s, chunks[action.chunk]
        if action.kind == "F":
            keeps_top = ahead and action._replace(kind="B") in (*backwards[:1], behind.get(action))
            for at, layer in enumerate(layers):
                now_s += layer.forward_s
                if layer.copied:
                    changes.append((now_s, layer.leaves))
                    if at < len(layers) - 1 or not keeps_top:
                        copies.offload(action, now_s, layer.copy_s, layer.leaves, at)
        else:
            following = next_backward.get(action)
            for at, layer in reversed([*enumerate(layers)]):
                now_s += layer.before_s
                reload(action, at)  # if it was not ahead
                back_s = copies.back_s(action, at)
                now_s = max(now_s, back_s)
                if ahead and at:
                    reload(action, at - 1)
                elif ahead and following is not None:
                    reload(following, len(chunks[following.chunk]) - 1)  # its top layer
                now_s += layer.rest_s
                if layer.copied:
                    changes.append((now_s, -(layer.copied if back_s else layer.leaves)))
        if exchange_s is not None:
            now_s = max(now_s, copies.free_s - exchange_s)
        seconds[action.kind, action.chunk, phase] = now_s - begin_s
    changes += [copy.memory for copy in copies.done]
    return seconds, max(accumulate((change for _, change in sorted(changes)), initial=0))


class StockLayer(NamedTuple):
    kind: LayerKind
    halves: LayerBytes
    """The first layer of a checkpoint has one, for all that it recomputes; the others have none."""
    whole: bool = False

    @property
    def bytes(self) -> HalfBytes:
        return HalfBytes(*map(sum, zip(*self.halves, strict=True)))


@lru_cache(maxsize=4096)
def chunk_layers(
    shape: LayerShape, setting: StockSetting, kinds: tuple[LayerKind, ...], *, first: bool
) -> tuple[StockLayer, ...]:
    """The layers of one chunk. `first`: whether it is the model's first chunk. Cached: most chunks are alike."""
    number = setting.layers or 0
    whole, size = {"uniform": (len(kinds), number), "block": (number, 1), None: (0, 1)}[setting.method]
    checkpoints = (kinds[at : min(at + size, whole)] for at in range(0, min(whole, len(kinds)), size))
    known = {kind: layer_bytes(shape, setting, kind) for kind in {*kinds[whole:]}}
    layers = [*chain.from_iterable(_checkpointed(shape, inside) for inside in checkpoints)]
    layers += [StockLayer(kind, known[kind]) for kind in kinds[whole:]]
    for at in range(offloading_layers(setting, len(layers)), len(layers)) if setting.offload else ():
        kept = (half.keeping(half.leaves)._replace(copied=0, input_leaves=0) for half in layers[at].halves)
        layers[at] = layers[at]._replace(halves=tuple(kept))
    if layers and not first:
        halves = layers[0].halves
        layers[0] = layers[0]._replace(halves=(halves[0].keeping(halves[0].input_leaves), *halves[1:]))
    return tuple(layers)


def _checkpointed(shape: LayerShape, kinds: Sequence[LayerKind]) -> Iterator[StockLayer]:
    inside_bytes = sum(half.stays for kind in kinds for half in layer_bytes(shape, NONE, kind))
    yield StockLayer(kinds[0], (HalfBytes(shape.input_bytes, inside_bytes - shape.input_bytes),), whole=True)
    yield from (StockLayer(kind, (), whole=True) for kind in kinds[1:])


def offloading_layers(setting: StockSetting, layers: int) -> int:
    """Number of a chunk's layers that offload all configured modules. Megatron drops whole groups (one per module and layer) from
    the end."""
    groups = len(setting.offload)
    count = layers * groups
    return (count - int(count * (1 - setting.fraction))) // groups


def recomputed_bytes(layers: Sequence[StockLayer]) -> int:
    """Most bytes by which a chunk's memory rises during one micro-batch's backward, which frees it from the last half down."""
    held_bytes = peak_bytes = 0
    for half in reversed([half for layer in layers for half in layer.halves]):
        peak_bytes = max(peak_bytes, held_bytes + half.again)
        held_bytes -= half.stays
    return peak_bytes
