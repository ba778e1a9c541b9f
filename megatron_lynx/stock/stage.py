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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from megatron_lynx.simulator.passes import PHASES, ChunkPasses, HostCopies, TimedPass, in_phases
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

    def parts(self, staging_bytes: int = 0) -> Parts:
        """`staging_bytes`: of copies in flight."""
        job, stage = self.job, self.stage
        overlap, whole = bool(self.setting.overlap), not self.setting.recompute
        parts = parts_beside_layers(self.of_job.counted, stage, layer_whole=whole, overlapped=overlap)
        if overlap:
            parts = parts.more("backward", self._pair_more_bytes)
        stays = [sum(layer.bytes.stays for layer in chunk) for chunk in self.chunks]
        return replace(
            parts,
            **activations_in_flight(job, stage, stays, self._deferred_bytes),
            staging=staging_bytes,
            recomputed=max(map(recomputed_bytes, self.chunks)),
        )

    @property
    def _deferred_bytes(self) -> int:
        """Bytes of the head's inputs and logits gradients until the end of the step."""
        if self.stage < self.job.parallel.pipeline - 1:
            return 0
        shape = self.of_job.shape
        return deferred_heads(self.job, self.setting) * (shape.input_bytes + logits_gradient_bytes(shape))

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
    def copies(self) -> StageCopies | None:
        if not any(layer.copied for chunk in self._layers for layer in chunk):
            return None
        blocking = self.schedule.blocking and self.schedule.pipeline > 1
        exchange_s = self.profile.link_s("p2p", self.of_job.shape.input_bytes) if blocking else None
        copies = StageCopies(self._layers, exchange_s, ahead=self.setting.method is None)
        copies.walk(list(self.schedule.phases(self.stage)))
        return copies

    @cached_property
    def held(self) -> Parts:
        return self.parts(0 if self.copies is None else self.copies.most_bytes())

    @cached_property
    def passes(self) -> list[ChunkPasses]:
        """Passes of each chunk. Host time is that of the closest setting for which it is known."""
        job, setting = self.job, self.setting
        measured: Setting = "full" if setting.method == "uniform" else "none"
        host = stage_host_s(job, self.profile, self.stage, measured) * (1 / job.chunks)
        apart = [self._chunk_passes(chunk, host) for chunk in range(job.chunks)]
        return [self._paired(chunk, apart, host) for chunk in range(job.chunks)] if setting.overlap else apart

    def _paired(self, chunk: int, apart: Sequence[ChunkPasses], host: Passes) -> ChunkPasses:
        """Return a chunk whose steady forward lasts as long as its pair with a backward, in the mean over the stage's chunks, and
        whose steady backward takes no time. Copies overlap with the pair, which waits for longer ones."""
        job, beside = self.job, shared_rates(self.profile, self.job.fused_dispatch.computing_kept)
        both_s = 0.0
        for other in range(job.chunks):
            ends_s = sum(end.forward_s for end in self._ends(chunk)) + sum(end.backward_s for end in self._ends(other))
            nodes_s = paired_s(self._nodes[chunk], self._nodes[other], beside, delayed=self.setting.delayed)
            copies_s = max(sum(layer.copy_s for layer in self._layers[which]) for which in (chunk, other))
            both_s += max(nodes_s + ends_s, copies_s) / job.chunks
        return apart[chunk].with_steady(TimedPass(both_s).issued_in(host.both_s), TimedPass())

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

    def _chunk_passes(self, chunk: int, host: Passes) -> ChunkPasses:
        layers, walked = self._layers[chunk], {} if self.copies is None else self.copies.seconds
        ways: tuple[tuple[ActionKind, float, float], ...] = (
            ("F", host.forward_s, sum(layer.forward_s for layer in layers)),
            ("B", host.backward_s, sum(sum(layer.backward_s) for layer in layers)),
        )
        passes = {
            (kind, phase): TimedPass(walked.get((kind, chunk, phase), plain_s)).issued_in(host_s)
            for kind, host_s, plain_s in ways
            for phase in PHASES
        }
        return ChunkPasses(in_phases(passes))

    @cached_property
    def _layers(self) -> list[list[CopiedLayer]]:
        """By chunk, with embedding and output layer."""
        return [
            with_ends([self._timed_layer(layer) for layer in layers], *self._ends(chunk))
            for chunk, layers in enumerate(self.chunks)
        ]

    def _timed_layer(self, layer: StockLayer) -> CopiedLayer:
        attention, mlp = self._seconds[layer.kind]
        forward_s = attention.forward_s + mlp.forward_s
        again_s = (forward_s + self._both_ways_s(layer), 0.0) if layer.whole else (mlp.again_s, attention.again_s)
        backward_s = (again_s[0] + mlp.backward_s, again_s[1] + attention.backward_s)
        copied, leaves = layer.bytes.copied, layer.bytes.leaves
        return CopiedLayer(forward_s, backward_s, self.profile.link_s("host", copied) if copied else 0.0, leaves, copied)

    def _both_ways_s(self, layer: StockLayer) -> float:
        """Seconds of copying recomputed tensors of a whole-recomputed layer in both directions."""
        if not self.setting.offload:
            return 0.0
        halves = layer_bytes(self.of_job.shape, self.setting, layer.kind)
        return 2 * self.profile.link_s("host", sum(half.copied for half in halves))


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
    copies: HostCopies = field(default_factory=HostCopies)
    _now_s: float = 0.0
    _changes: list[tuple[float, int]] = field(default_factory=list)
    """(time, bytes that passes allocate or free)."""

    def walk(self, actions: Sequence[tuple[Action, Phase]]) -> None:
        order = [action for action, _ in actions]
        backwards = [action for action in order if action.kind == "B"]
        behind, next_backward = dict(pairwise(order)), dict(pairwise(backwards))
        for action, phase in actions:
            begin_s = self._now_s
            if action.kind == "F":
                own = action._replace(kind="B")
                self._forward(action, keeps_top=own in (*backwards[:1], behind.get(action)))
            else:
                self._backward(action, next_backward.get(action))
            if self.exchange_s is not None:  # device synchronisation
                self._now_s = max(self._now_s, self.copies.free_s - self.exchange_s)
            self.seconds[action.kind, action.chunk, phase] = self._now_s - begin_s

    def most_bytes(self) -> int:
        changes = sorted([*self._changes, *(copy.memory for copy in self.copies.done)])
        return max(accumulate((change for _, change in changes), initial=0))

    def _forward(self, action: Action, *, keeps_top: bool) -> None:
        layers = self.chunks[action.chunk]
        for at, layer in enumerate(layers):
            self._now_s += layer.forward_s
            if not layer.copied:
                continue
            self._changes.append((self._now_s, layer.leaves))
            if at < len(layers) - 1 or not keeps_top or not self.ahead:
                self.copies.offload(action, self._now_s, layer.copy_s, layer.leaves, at)

    def _backward(self, action: Action, next_backward: Action | None) -> None:
        layers = self.chunks[action.chunk]
        for at in reversed(range(len(layers))):
            before_s, rest_s = layers[at].backward_s
            self._now_s += before_s
            self._reload(action, at)  # if it was not ahead
            back_s = self.copies.back_s(action, at)
            self._now_s = max(self._now_s, back_s)
            if self.ahead and at:
                self._reload(action, at - 1)
            elif self.ahead and next_backward is not None:
                self._reload(next_backward, len(self.chunks[next_backward.chunk]) - 1)  # its top layer
            self._now_s += rest_s
            if layers[at].copied:
                self._changes.append((self._now_s, -(layers[at].copied if back_s else layers[at].leaves)))

    def _reload(self, backward: Action, at: int) -> None:
        layer = self.chunks[backward.chunk][at]
        self.copies.reload(backward, self._now_s, layer.copy_s, layer.copied, at)


def with_ends(layers: Sequence[CopiedLayer], first: BlockProfile, last: BlockProfile) -> list[CopiedLayer]:
    timed = list(layers) or [CopiedLayer(0.0, (0.0, 0.0))]
    for at, end, before_s, rest_s in ((0, first, 0.0, first.backward_s), (-1, last, last.backward_s, 0.0)):
        (first_s, second_s), forward_s = timed[at].backward_s, timed[at].forward_s + end.forward_s
        timed[at] = timed[at]._replace(forward_s=forward_s, backward_s=(first_s + before_s, second_s + rest_s))
    return timed


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
