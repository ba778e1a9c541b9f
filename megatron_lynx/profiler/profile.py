"""The profile: what one layer, one link and the ends of the model cost, and where those figures came from.

    measured.measure_layer ──HalfProfile──┐
    links.measure_links ─────LinkPoint────┼──> Profile ──save_profile──> profile.yaml ──load_profile──> planner
    measured.measure_block ──BlockProfile─┘

Seconds and bytes are those of one micro-batch on one rank, that is of one tensor-parallel shard, without communication.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_lynx.anatomy import Facts, Half, Pass, Section, halves_of, sections_of
from megatron_lynx.config.experts import Experts
from megatron_lynx.config.host_time import HostAdam, HostTime, Implementation
from megatron_lynx.config.job import Job
from megatron_lynx.config.later import IN_EXPERTS, as_by_default
from megatron_lynx.config.model import Fusion
from megatron_lynx.config.opaque import Opaque
from megatron_lynx.config.parallel import ContextExchange
from megatron_lynx.fp8_recipes import Recipe
from megatron_lynx.kinds.experts.section import BESIDE
from megatron_lynx.kinds.latent.sizes import LatentSizes
from megatron_lynx.kinds.opaque.section import OPAQUE, OpaqueName
from megatron_lynx.kinds.section import Role
from megatron_lynx.kinds.sections import KindName
from megatron_lynx.profiler.quantized import BF16_BYTES, cast_bytes
from megatron_lynx.validation import Part, validated
from megatron_lynx.whole_file import write_whole
from megatron_lynx.yaml_file import read_yaml, write_yaml

Hiding = Literal["nothing", "stock", "userbuffers"]
"""Which tensor-parallel collectives GEMMs hide, as far as these last: none; those beside a column-parallel linear's backward;
all, each behind its own linear."""

LinkKind = Literal["all_reduce", "all_gather", "reduce_scatter", "p2p", "host"]
"""Messages between tensor-parallel ranks, between stages, and to host memory or back, one way at a time."""


class SavedTensor(Part):
    """One memory block that a layer half's backward, or a replay that passes it, needs. Views share their block."""

    bytes: int = Field(ge=0)
    made_by: str
    """The item that made it, or `input` for what the half was called with."""
    saved_by: tuple[str, ...]
    """The items whose backward reads it, in order. Empty for a site's output that only a replay would have to pass."""
    output: bool = False
    """Whether it is what its site returned (a kept site's output is remembered where a replay has to pass it)."""


class ItemProfile(Part):
    """One item, one micro-batch. A replay takes as long as the forward did."""

    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    saved_bytes: int = Field(ge=0)
    """What it adds to the memory held until backward: blocks that nothing before it had saved, without parameters."""
    output_bytes: int = Field(ge=0)
    flops: int = Field(ge=0)
    """FLOPs of the GEMMs and batched GEMMs of its forward, as torch's FlopCounterMode counts them."""
    dgrad_s: float = Field(default=0.0, ge=0)
    """Linear layers: the part of backward that makes the gradient of the input (stock hides the input all-gather behind it)."""
    wgrad_s: float = Field(default=0.0, ge=0)
    """Linear layers: the part that makes the gradient of the weight (stock hides the gradient's reduction behind it)."""


class HalfProfile(Part):
    """One half of one layer, one micro-batch."""

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
        """What the half holds when everything is kept: its input and every saved block."""
        return self.input_bytes + sum(tensor.bytes for tensor in self.tensors if tensor.saved_by)


class BlockProfile(Part):
    """An end of the model, one micro-batch: what lies before the first layer, or behind the last."""

    forward_s: float = Field(default=0.0, ge=0)
    backward_s: float = Field(default=0.0, ge=0)
    saved_bytes: int = Field(default=0, ge=0)
    """What it holds from forward to backward, what the last layer hands it included."""


class ExpertHalf(HalfProfile):
    """The MLP half of a layer of experts. Its items are counted without exchanges and collectives."""

    exchange_s: float = Field(default=0.0, ge=0)
    """Seconds of one all-to-all of rows among ranks that share experts; there are two in each pass. Those of probabilities are a
    few bytes a row, and not counted."""
    cut_s: float = Field(default=0.0, ge=0)
    """Seconds in which experts that are cut gather their rows, or scatter their sums; once each in each pass."""
    collective_s: float = Field(default=0.0, ge=0)
    """Seconds of one collective of shared experts; there are two in each pass."""
    shared_rate: float = Field(default=0.0, ge=0, le=1)
    """The share of their rate at which shared experts compute beside the exchanges; 0: they compute before them."""

    def beside_s(self, passing: Pass, role: Role) -> float:
        """Seconds of one exchange of rows, by the role of its item, behind which shared experts compute."""
        if not self.shared_rate:
            return 0.0
        items = [self.items[name] for name in BESIDE[role]]
        computed_s = sum(item.forward_s if passing == "fwd" else item.backward_s for item in items)
        return min(self.shared_rate * self.exchange_s, computed_s)

    def waits_s(self, passing: Pass) -> float:
        """Seconds of one pass in which it waits for other ranks."""
        return 2 * (self.exchange_s + self.cut_s + self.collective_s) - sum(self.beside_s(passing, role) for role in BESIDE)

    @property
    def forward_s(self) -> float:
        return super().forward_s + self.waits_s("fwd")

    @property
    def backward_s(self) -> float:
        return super().backward_s + self.waits_s("bwd")

    @property
    def communication_s(self) -> float:
        """Seconds of both passes in which it waits for other ranks."""
        return self.waits_s("fwd") + self.waits_s("bwd")


class LinkPoint(Part):
    """One measured message. For all-gather and reduce-scatter `bytes` is the size of the whole (gathered) tensor."""

    kind: LinkKind
    bytes: int = Field(ge=1)
    seconds: float = Field(ge=0)


class Shape(Part):
    """What the figures were measured for; a profile of another shape is refused by the planner."""

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
    """The width of a head where it is not hidden / heads."""
    latent: LatentSizes | None = None
    """The sizes of multi-latent attention."""
    fp8: Recipe | None = None
    """The FP8 recipe of its linears."""
    experts: Experts | None = None
    expert: int = 1
    expert_tensor: int = 1
    """Ranks among which experts are shared out, and among which each is cut; 1 without experts."""
    mtp: int = 0
    """Layers of multi-token prediction, whose figures are a layer's and the head's."""
    opaque: tuple[Opaque, ...] = ()
    """What some layers have that nobody looks into."""
    kinds: tuple[KindName, ...] = ()
    """Kinds of what fills a half, in every layer, that no other key speaks of."""

    @property
    def te(self) -> bool:
        """Whether the layers are Transformer Engine's."""
        return self.implementation == "transformer_engine"

    @property
    def facts(self) -> Facts:
        """What decides which kinds fill the halves of layers without experts."""
        return Facts(te=self.te, latent=self.latent, kinds=self.kinds)

    @property
    def sections_with_experts(self) -> tuple[Section, Section]:
        """What fills those of a layer of experts."""
        return sections_of(self.facts._replace(experts=True))

    @property
    def halves(self) -> Mapping[Half, Section]:
        """What fills the halves of a layer without experts."""
        return halves_of(self.facts)


LATER = (
    *("qk_norm", "kv_channels", "latent", "fp8", "experts", "expert", "expert_tensor", "context_exchange", "context_levels"),
    *("kinds", "opaque", "mtp"),
)
"""What shapes did not always say: by default it changes nothing."""


class Source(Part):
    """Where the figures came from."""

    how: Literal["measured", "analytic"]
    machine: str
    """What was measured on, as a person would say it."""
    made_by: str
    """Our version, and the versions of torch and megatron-core."""
    repetitions: int = Field(ge=1)
    """Every figure is the median of so many."""
    interconnect: str = "as found"
    """What lay between the ranks: a shaped link, loopback, NVLink."""
    stood_in_for: str | None = None
    """What was missing and replaced by a stand-in: the seconds then describe no real device."""
    fusions: tuple[Fusion, ...] | None = None
    """Megatron's fusions that the measured layers had on. None: not known, as in profiles from before it was written down, which
    were measured without; and in those that were not measured."""

    @property
    def caution(self) -> str | None:
        """What whoever uses the seconds is to be told."""
        if (missing := self.stood_in_for) is None:
            return None
        return f"seconds were measured with a stand-in for {missing}, and describe no real device: only bytes are right"


class Profile(Part):
    """A whole profile, version 1."""

    version: Literal[1] = 1
    source: Source
    shape: Shape
    attention: HalfProfile
    mlp: HalfProfile
    experts: ExpertHalf | None = None
    """What stands in place of `mlp` in layers of experts; none: there are no such layers."""
    opaque: Mapping[OpaqueName, HalfProfile] = {}
    """What stands in place of a half that nobody looks into, with the seconds that it waits for other ranks."""
    links: tuple[LinkPoint, ...] = ()
    embedding: BlockProfile = BlockProfile()
    head: BlockProfile = BlockProfile()
    """Final norm, output projection and loss."""
    head_summand_s: float = Field(default=0.0, ge=0)
    """Each piece more of a head in pieces: its weight's gradient is read, and written with a summand more. Measured by nobody."""
    interference: float = Field(default=1.0, ge=1.0)
    """How many times longer a replay takes while a collective is under way."""
    host_time: HostTime | None = None
    """How long the host takes to issue a layer. None: not known, as in profiles from before it was measured."""
    hiding: Hiding = "stock"
    """Nobody measures it: the job says it (`config.overlap`)."""
    messages_between_passes: bool = False
    """Whether stages with several chunks exchange messages between passes, not behind them. The job says that, too."""

    @model_validator(mode="after")
    def _whole(self) -> Profile:
        problems = []
        for half, section in self.shape.halves.items():
            problems += _misnamed(self.half(half), half, section.names)
        if self.shape.experts is not None and self.experts is not None:
            problems += _misnamed(self.experts, self.shape.experts.section.name, self.shape.experts.section.names)
        if (self.shape.experts is None) != (self.experts is None):
            problems.append("shape.experts and experts belong together: give both, or none")
        needed = {each.kind for each in self.shape.opaque}
        if needed != self.opaque.keys():
            problems.append(f"opaque has {sorted(self.opaque)}, needed {sorted(needed)}, as in shape.opaque")
        problems += [
            each for name in needed & self.opaque.keys() for each in _misnamed(self.opaque[name], name, OPAQUE[name].names)
        ]
        given = Counter((point.kind, point.bytes) for point in self.links)
        twice = [message for message, times in given.items() if times > 1]
        problems += [f"links: {kind} of {size} bytes is given twice, needed once" for kind, size in twice]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def half(self, half: Half) -> HalfProfile:
        costs: HalfProfile = getattr(self, half)
        return costs

    def of(self, section: Section) -> HalfProfile:
        """The figures of what fills a half."""
        costs: HalfProfile | None = self.opaque.get(section.name) if section.opaque else getattr(self, section.profiled_as)  # type: ignore[call-overload]
        assert costs is not None, "a profile with such a section has its figures"
        return costs

    @property
    def message_bytes(self) -> int:
        """What a tensor-parallel collective of a layer moves: the residual stream of all rows."""
        return self.attention.input_bytes * (self.shape.tensor if self.shape.sequence_parallel else 1)

    def gathered_input(self, message_bytes: int) -> int:
        """Bytes that the gather of a column-parallel linear's input moves; in FP8 it is cast before."""
        return message_bytes if self.shape.fp8 is None else cast_bytes(self.shape.fp8, message_bytes // BF16_BYTES)

    def link_s(self, kind: LinkKind, size_bytes: int) -> float:
        """Seconds of one message, on straight lines between the measured sizes.

        Beyond the largest the last line goes on; below the smallest everything is latency. One point alone is taken to be
        all bandwidth. A kind without any point costs nothing: no group in what was measured sends it.
        """
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
    def host_adam(self) -> HostAdam | None:
        """How fast the host's CPU steps an optimizer, where that is known."""
        return None if self.host_time is None else self.host_time.adam

    @property
    def digest(self) -> str:
        """SHA-256 of the profile's canonical JSON, less what came later and is off, what only few plans depend on, and host time
        (see `Job.digest`): what a plan records as its origin."""
        off: dict[str, Any] = dict.fromkeys(as_by_default(self, ("opaque", "hiding", "messages_between_passes")), True)
        off |= {"host_time": True, "head_summand_s": True, "shape": as_by_default(self.shape, LATER)}
        if self.experts is None or self.shape.experts is None:
            off["experts"] = True
        else:
            off["shape"] = dict.fromkeys(off["shape"], True) | {"experts": as_by_default(self.shape.experts, IN_EXPERTS)}
        off["source"] = as_by_default(self.source, ("stood_in_for", "fusions"))
        return hashlib.sha256(self.model_dump_json(exclude=off).encode()).hexdigest()


def _misnamed(half: HalfProfile, where: str, items: tuple[str, ...]) -> list[str]:
    """Items that the half does not have, or lacks."""
    problems = []
    if set(half.items) != set(items):
        problems.append(f"{where}.items are {sorted(half.items)}, needed {sorted(items)}")
    for index, tensor in enumerate(half.tensors):
        problems += _misplaced(tensor, f"{where}.tensors.{index}", items)
    return problems


def _misplaced(tensor: SavedTensor, where: str, items: tuple[str, ...]) -> list[str]:
    """Names that are no items of the tensor's half."""
    known = ", ".join(items)
    made = [] if tensor.made_by in ("input", *items) else [f"{where}.made_by is {tensor.made_by!r}, needed one of input, {known}"]
    return made + [f"{where}.saved_by has {name!r}, needed some of {known}" for name in tensor.saved_by if name not in items]


def shape_of(job: Job) -> Shape:
    """What a profile of this job is a profile of."""
    model, parallel = job.model, job.parallel
    names = ("hidden", "ffn", "heads", "kv_groups", "seq", "dtype", "implementation", "qk_norm", "mtp")
    experts = None if model.experts is None else model.experts.one_after_the_other  # the same layers
    facts = {name: getattr(model, name) for name in names} | {"fp8": model.fp8_recipe, "experts": experts}
    usual = model.latent is not None or model.query_width == model.hidden
    facts |= {
        "kv_channels": None if usual else model.head_size,
        "latent": model.latent,
        "kinds": model.kinds,
        "opaque": model.opaque,
    }
    layout = {name: getattr(parallel, name) for name in ("tensor", "sequence_parallel", "context")}
    if parallel.context > 1:
        layout |= {"context_exchange": parallel.context_exchange, "context_levels": parallel.context_levels}
    if model.experts is not None:
        layout |= {"expert": parallel.expert, "expert_tensor": parallel.expert_tensor_size}
    return Shape(micro=job.batch.micro, **layout, **facts)


def hiding_of(job: Job) -> Hiding:
    """What the GEMMs of a job hide for certain. Userbuffers may hide nothing more, at worst."""
    return "stock" if job.overlap.linears or job.parallel.sequence_parallel else "nothing"


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile, YAML or JSON. Raises `ConfigError` with every problem and its place."""
    return validated(Profile, read_yaml(path), os.fspath(path))


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write it as YAML, whole or not at all. Raises `ConfigError` where the path cannot be written."""
    write_whole(path, write_yaml(profile.model_dump(mode="json")))
