"""A profile: costs of one layer, link, embedding and output layer, with their origin.

    measured.measure_layer ──HalfProfile──┐
    links.measure_links ─────LinkPoint────┼──> Profile ──save_profile──> profile.yaml ──load_profile──> planner
    measured.measure_block ──BlockProfile─┘

Seconds and bytes are per micro-batch on one rank (one tensor-parallel shard), without communication.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal, TypeVar

from pydantic import BaseModel, Field

from megatron_lynx.anatomy import HALVES, Facts, Half, Pass, Section, halves_of
from megatron_lynx.config.cluster import HostAdam, HostTime, Implementation
from megatron_lynx.config.experts import Experts, Opaque
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Fusion
from megatron_lynx.config.parallel import ContextExchange
from megatron_lynx.figures import Learned
from megatron_lynx.fp8_recipes import Recipe
from megatron_lynx.kinds.experts.section import BESIDE
from megatron_lynx.kinds.latent.section import LatentSizes
from megatron_lynx.kinds.opaque.section import OPAQUE, OpaqueName
from megatron_lynx.kinds.section import Role
from megatron_lynx.kinds.sections import KindName
from megatron_lynx.profiler.shape import BF16_BYTES, cast_bytes
from megatron_lynx.validation import Part, digest_of, validated
from megatron_lynx.whole_file import write_whole
from megatron_lynx.yaml_file import read_yaml, write_yaml

Hiding = Literal["nothing", "stock", "userbuffers"]
"""Tensor-parallel collectives that stock overlaps with GEMMs: none; those of a column-parallel linear's backward; all, each with
its own linear."""

LinkKind = Literal["all_reduce", "all_gather", "reduce_scatter", "p2p", "host"]
"""Messages between tensor-parallel ranks, between stages, and to or from host memory, one direction at a time."""


class SavedTensor(Part):
    """A memory block needed by a half's backward, or by a recomputation that skips its site. Views share their block."""

    bytes: int = Field(ge=0)
    made_by: str
    """The item that made it, or `input` for the half's input."""
    saved_by: tuple[str, ...]
    """Items whose backward reads it, in order. Empty for an output that only a recomputation reads."""
    output: bool = False
    """Whether it is its site's output (kept if a recomputation skips the site)."""
    blocks: int = Field(default=1, gt=0)
    """Blocks of equal size that it consists of: in FP8, experts' inputs are one for each expert."""


def own_tensors(item: str, *sizes: int) -> list[SavedTensor]:
    return [SavedTensor(bytes=size, made_by=item, saved_by=(item,)) for size in sizes]


class ItemProfile(Part):
    """One item, one micro-batch. Recomputation takes as long as forward."""

    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    saved_bytes: int = Field(ge=0)
    """Bytes it adds to the memory kept until backward: blocks not saved by an earlier item, without parameters."""
    output_bytes: int = Field(ge=0)
    flops: int = Field(ge=0)
    """FLOPs of its forward's GEMMs and batched GEMMs, as counted by torch's FlopCounterMode."""
    dgrad_s: float = Field(default=0.0, ge=0)
    """Linears: input-gradient part of backward, with which stock overlaps the input's all-gather."""
    wgrad_s: float = Field(default=0.0, ge=0)
    """Linears: weight-gradient part of backward, with which stock overlaps the input gradient's reduction."""


class HalfProfile(Part):
    input_bytes: int = Field(ge=0)
    items: dict[str, ItemProfile]
    tensors: tuple[SavedTensor, ...]

    @property
    def forward_s(self) -> float:
        return sum(item.forward_s for item in self.items.values())

    @property
    def backward_s(self) -> float:
        return sum(item.backward_s for item in self.items.values())

    @property
    def saved_bytes(self) -> int:
        return self.input_bytes + sum(tensor.bytes for tensor in self.tensors if tensor.saved_by)


class BlockProfile(Part):
    forward_s: float = Field(default=0.0, ge=0)
    backward_s: float = Field(default=0.0, ge=0)
    saved_bytes: int = Field(default=0, ge=0)
    """Bytes kept from forward to backward, including the last layer's output."""

    def longer(self, forward_s: float, backward_s: float) -> BlockProfile:
        return self.model_copy(update={"forward_s": self.forward_s + forward_s, "backward_s": self.backward_s + backward_s})


class ExpertHalf(HalfProfile):
    """The MLP half of a layer with experts. Its items exclude communication."""

    exchange_s: float = Field(default=0.0, ge=0)
    """Seconds of one all-to-all of rows among expert-parallel ranks, two per pass. Those of probabilities, a few bytes per row,
    are not counted."""
    cut_s: float = Field(default=0.0, ge=0)
    """Seconds in which tensor-parallel experts gather their rows, or scatter their sums; once each per pass."""
    collective_s: float = Field(default=0.0, ge=0)
    """Seconds of one collective of shared experts, two per pass."""
    shared_rate: float = Field(default=0.0, ge=0, le=1)
    """Relative rate of shared experts during the exchanges; 0: they compute before them."""

    def beside_s(self, passing: Pass, role: Role) -> float:
        """Return the seconds of one row exchange that overlap shared experts, by the role of its item."""
        if not self.shared_rate:
            return 0.0
        items = [self.items[name] for name in BESIDE[role]]
        computed_s = sum(item.forward_s if passing == "fwd" else item.backward_s for item in items)
        return min(self.shared_rate * self.exchange_s, computed_s)

    def waits_s(self, passing: Pass) -> float:
        return 2 * (self.exchange_s + self.cut_s + self.collective_s) - sum(self.beside_s(passing, role) for role in BESIDE)

    @property
    def forward_s(self) -> float:
        return super().forward_s + self.waits_s("fwd")

    @property
    def backward_s(self) -> float:
        return super().backward_s + self.waits_s("bwd")


class LinkPoint(Part):
    """One message. For all-gather and reduce-scatter, `bytes` is the size of the gathered tensor."""

    kind: LinkKind
    bytes: int = Field(ge=1)
    seconds: float = Field(ge=0)


class Shape(Part):
    """Configuration that the figures are for; the planner refuses a profile of another shape."""

    hidden: int
    ffn: int
    heads: int
    kv_groups: int
    seq: int
    micro: int
    dtype: str
    tensor: int
    sequence_parallel: bool
    context: int = 1
    context_exchange: ContextExchange = "p2p"
    context_levels: tuple[int, int] | None = None
    implementation: Implementation = "local"
    qk_norm: bool = False
    kv_channels: int | None = None
    """Width of a head, if not hidden / heads."""
    latent: LatentSizes | None = None
    fp8: Recipe | None = None
    experts: Experts | None = None
    expert: int = 1
    expert_tensor: int = 1
    """Ranks that share a layer's experts, and that split each expert; 1 without experts."""
    mtp: int = 0
    """Layers of multi-token prediction, with the figures of a layer and of the output layer."""
    opaque: tuple[Opaque, ...] = ()
    kinds: tuple[KindName, ...] = ()
    adapted: tuple[str, ...] = ()
    """Linears with a low-rank adapter; with any, all other weights are frozen."""

    @property
    def te(self) -> bool:
        return self.implementation == "transformer_engine"

    @property
    def facts(self) -> Facts:
        return Facts(latent=self.latent, kinds=self.kinds)

    @property
    def halves(self) -> Mapping[Half, Section]:
        return halves_of(self.facts)

    @property
    def sections(self) -> tuple[Section, Section]:
        attention, mlp = self.halves.values()
        return attention, mlp if self.experts is None else self.experts.section


class Source(Part):
    how: Literal["measured", "analytic"]
    machine: str
    made_by: str
    """Versions of megatron-lynx, torch and megatron-core."""
    repetitions: int = Field(ge=1)
    """Repetitions whose median each figure is."""
    interconnect: str = "as found"
    """Link between the ranks: shaped, loopback, NVLink."""
    stood_in_for: str | None = None
    """Missing part that a stand-in replaced: the seconds then describe no real device."""
    fusions: tuple[Fusion, ...] | None = None
    """Megatron's fusions in the measured layers. Unknown (None) in older profiles, measured without any, and in estimates."""

    @property
    def caution(self) -> str | None:
        if (missing := self.stood_in_for) is None:
            return None
        return f"seconds were measured with a stand-in for {missing}, and describe no real device: only bytes are right"


class Profile(Part):
    version: Literal[1] = 1
    source: Source
    shape: Shape
    attention: HalfProfile
    mlp: HalfProfile
    experts: ExpertHalf | None = None
    """Replaces `mlp` in layers with experts; None without."""
    opaque: Mapping[OpaqueName, HalfProfile] = {}
    """Replaces opaque halves; seconds include their communication."""
    links: tuple[LinkPoint, ...] = ()
    embedding: BlockProfile = BlockProfile()
    head: BlockProfile = BlockProfile()
    head_summand_s: float = Field(default=0.0, ge=0)
    """Additional seconds per piece of an output layer in pieces, which reads and accumulates its weight gradient again. Always
    estimated."""
    interference: float = Field(default=1.0, ge=1.0)
    host_time: HostTime | None = None
    """Host seconds to issue a layer. Unknown (None) in older profiles."""
    hiding: Hiding = "stock"
    """Set by the job (`config.parallel`), never measured."""
    messages_between_passes: bool = False
    """Whether stages with several chunks exchange messages between passes instead of overlapped. Set by the job."""

    def issued(self, *, graphs: bool) -> Profile:
        """Return the profile of a launch that captures CUDA graphs, or does not: with graphs host time is not counted."""
        return self.model_copy(update={"host_time": None}) if graphs else self

    def _problems(self) -> Iterator[str]:
        for half, section in self.shape.halves.items():
            yield from _misnamed(self.half(half), half, section.names)
        if self.shape.experts is not None and self.experts is not None:
            yield from _misnamed(self.experts, self.shape.experts.section.name, self.shape.experts.section.names)
        if (self.shape.experts is None) != (self.experts is None):
            yield "shape.experts and experts belong together: give both, or none"
        needed = {opaque.kind for opaque in self.shape.opaque}
        if needed != self.opaque.keys():
            yield f"opaque has {sorted(self.opaque)}, needed {sorted(needed)}, as in shape.opaque"
        for name in needed & self.opaque.keys():
            yield from _misnamed(self.opaque[name], name, OPAQUE[name].names)
        given = Counter((point.kind, point.bytes) for point in self.links)
        twice = [message for message, times in given.items() if times > 1]
        yield from (f"links: {kind} of {size} bytes is given twice, needed once" for kind, size in twice)

    def half(self, half: Half) -> HalfProfile:
        costs: HalfProfile = getattr(self, half)
        return costs

    def of(self, section: Section) -> HalfProfile:
        named = self.opaque.get(section.name) if section.name in OPAQUE else None  # type: ignore[call-overload]
        costs: HalfProfile | None = named or getattr(self, section.profiled_as)
        assert costs is not None, "a profile with such a section has its figures"
        return costs

    @property
    def message_bytes(self) -> int:
        """Bytes of a layer's tensor-parallel collective: the residual stream on all rows."""
        return self.attention.input_bytes * (self.shape.tensor if self.shape.sequence_parallel else 1)

    def gathered_input(self, message_bytes: int) -> int:
        """Return the bytes of gathering a column-parallel linear's input, which FP8 casts first."""
        return message_bytes if self.shape.fp8 is None else cast_bytes(self.shape.fp8, message_bytes // BF16_BYTES)

    def link_s(self, kind: LinkKind, size_bytes: int) -> float:
        """Return the seconds of one message, interpolated linearly between the sizes. Above the largest size the last line is
        extended; below the smallest the time is constant. A single point is taken as pure bandwidth. A kind without points costs
        nothing: the profiled layout does not send it."""
        points = sorted((point.bytes, point.seconds) for point in self.links if point.kind == kind)
        if not points or not size_bytes:
            return 0.0
        if len(points) == 1:
            return points[0][1] * size_bytes / points[0][0]
        above = next((index for index, (size, _) in enumerate(points) if size >= size_bytes), len(points) - 1)
        (left, left_s), (right, right_s) = points[max(above, 1) - 1], points[max(above, 1)]
        slope = (right_s - left_s) / (right - left)
        return max(points[0][1], left_s + slope * (size_bytes - left)) if above else points[0][1]

    @property
    def link_rates(self) -> dict[LinkKind, float]:
        """Bytes per second of the largest message of each kind."""
        largest = {point.kind: point for point in sorted(self.links, key=lambda point: point.bytes)}
        return {kind: point.bytes / point.seconds for kind, point in largest.items() if point.seconds}

    @property
    def host_adam(self) -> HostAdam | None:
        return None if self.host_time is None else self.host_time.adam

    @property
    def digest(self) -> str:
        """Digest that plans record as their origin, without host time and without figures that are never measured."""
        return digest_of(self, {"host_time": True, "head_summand_s": True})


def _misnamed(half: HalfProfile, where: str, items: tuple[str, ...]) -> Iterator[str]:
    if set(half.items) != set(items):
        yield f"{where}.items are {sorted(half.items)}, needed {sorted(items)}"
    known = ", ".join(items)
    for index, tensor in enumerate(half.tensors):
        if tensor.made_by not in ("input", *items):
            yield f"{where}.tensors.{index}.made_by is {tensor.made_by!r}, needed one of input, {known}"
        for name in (name for name in tensor.saved_by if name not in items):
            yield f"{where}.tensors.{index}.saved_by has {name!r}, needed some of {known}"


def shape_of(job: Job) -> Shape:
    model, parallel = job.model, job.parallel
    names = ("hidden", "ffn", "heads", "kv_groups", "seq", "dtype", "implementation", "qk_norm", "mtp")
    experts = None if model.experts is None else model.experts.one_after_the_other  # the layers are the same
    facts = {name: getattr(model, name) for name in names} | {"fp8": model.fp8_recipe, "experts": experts}
    usual = model.latent is not None or model.query_width == model.hidden
    facts |= {
        "kv_channels": None if usual else model.head_size,
        "latent": model.latent,
        "kinds": model.kinds,
        "adapted": model.adapted,
        "opaque": model.opaque,
    }
    layout = {name: getattr(parallel, name) for name in ("tensor", "sequence_parallel", "context")}
    if parallel.context > 1:
        layout |= {"context_exchange": parallel.context_exchange, "context_levels": parallel.context_levels}
    if model.experts is not None:
        layout |= {"expert": parallel.expert, "expert_tensor": parallel.expert_tensor_size}
    return Shape(micro=job.batch.micro, **layout, **facts)


def hiding_of(job: Job) -> Hiding:
    """Return the collectives that a job certainly overlaps. In the worst case, userbuffers overlap no more."""
    return "stock" if job.overlap.linears or job.parallel.sequence_parallel else "nothing"


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile, YAML or JSON. Raises `ConfigError` with every problem and its place."""
    return validated(Profile, read_yaml(path, "a profile, which `megatron-lynx profile -o FILE` writes"), os.fspath(path))


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile as YAML, atomically. Raises `ConfigError` if the path cannot be written."""
    write_whole(path, write_yaml(profile.model_dump(mode="json")))


PartT = TypeVar("PartT", bound=BaseModel)


def as_learned(profile: Profile, learned: Learned | None) -> Profile:
    """Return the profile with a run's corrections; unchanged for None. Host copies, host time (Python's) and the optimizer's
    update, which profiles do not contain, stay as they are."""
    if learned is None:
        return profile
    times = learned.seconds
    parts: dict[str, object] = {half: _scaled(getattr(profile, half), times * getattr(learned, half)) for half in HALVES}
    parts |= {name: _scaled(getattr(profile, name), times) for name in ("embedding", "head")}
    if profile.experts is not None:
        parts["experts"] = _experts(profile.experts, learned)
    links = tuple(_link(point, learned) for point in profile.links)
    return profile.model_copy(update={**parts, "links": links, "head_summand_s": times * profile.head_summand_s})


def _link(point: LinkPoint, learned: Learned) -> LinkPoint:
    if point.kind == "host":
        return point
    return _scaled(point, learned.seconds * (1.0 if point.kind == "p2p" else learned.collectives))


def _experts(half: ExpertHalf, learned: Learned) -> ExpertHalf:
    collectives, exchanges = learned.seconds * learned.collectives, learned.seconds * learned.exchanges
    waits = {
        "exchange_s": exchanges * half.exchange_s,
        "cut_s": collectives * half.cut_s,
        "collective_s": collectives * half.collective_s,
    }
    return _scaled(half, learned.seconds * learned.experts).model_copy(update=waits)


def _scaled(part: PartT, times: float) -> PartT:
    changes: dict[str, object] = {name: times * value for name, value in part if name.endswith("_s") or name == "seconds"}
    if (items := getattr(part, "items", None)) is not None:
        changes |= {"items": {name: _scaled(item, times) for name, item in items.items()}}
    return part.model_copy(update=changes)
