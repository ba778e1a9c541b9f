"""Facts of the launch in a plan: model, layout and batch, as far as plans depend on them; and the plan's origin."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from megatron_lynx.anatomy import Facts, Half, LayerKind, Section, halves_of, sections_of
from megatron_lynx.figures import Learned
from megatron_lynx.fp8_recipes import Recipe
from megatron_lynx.kinds.captured import ROUTER, CapturedModule
from megatron_lynx.kinds.experts.section import EXCHANGES, Dispatcher
from megatron_lynx.kinds.latent.section import LatentSizes
from megatron_lynx.kinds.opaque.section import OpaqueName
from megatron_lynx.kinds.sections import KindName
from megatron_lynx.validation import Part

MOST_LAYERS = 1_000
NO_LAYERS = (1, 0)
NONE = "none"


class LayerRange(Part):
    """Layers `first` to `last`, both included, by Megatron's global layer number (from 1). Written `3` or `3-8`; an empty range
    is `none`, which is 1 to 0."""

    first: int = Field(ge=1, le=MOST_LAYERS)
    last: int = Field(ge=0, le=MOST_LAYERS)

    def _problems(self) -> Iterator[str]:
        if self.last < self.first and (self.first, self.last) != NO_LAYERS:
            yield f"{self} ends before it begins (write the smaller layer number first)"

    @classmethod
    def of(cls, layers: range) -> LayerRange:
        first, last = (layers[0], layers[-1]) if layers else NO_LAYERS
        return cls(first=first, last=last)

    def __str__(self) -> str:
        return str(_write_range(self))

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        return iter(range(self.first, self.last + 1))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.first <= layer <= self.last

    def __len__(self) -> int:
        return self.last - self.first + 1


def _read_range(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"first": value, "last": value}
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", value.strip())):
        first, last = int(match[1]), int(match[2])
        if (first, last) == NO_LAYERS:
            raise ValueError(f"{value} ends before it begins (write none where there are no layers)")
        return {"first": first, "last": last}
    if value == NONE:
        return dict(zip(("first", "last"), NO_LAYERS, strict=True))
    if isinstance(value, str):
        raise ValueError(f"{value!r} is no layer range, write one layer (3), a range (3-8), or none")
    return value


def _write_range(value: LayerRange) -> int | str:
    if (value.first, value.last) == NO_LAYERS:
        return NONE
    return value.first if value.first == value.last else f"{value.first}-{value.last}"


Layers = Annotated[
    LayerRange,
    BeforeValidator(_read_range, json_schema_input_type=int | str),
    PlainSerializer(_write_range, return_type=int | str),
]

IN_BF16 = ("first_in_bf16", "last_in_bf16")


class ModelFacts(Part):
    layers: int = Field(ge=1, le=MOST_LAYERS)
    hidden: int = Field(ge=1)
    ffn: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_groups: int = Field(ge=1)
    seq: int = Field(ge=1)
    implementation: Literal["local", "transformer_engine"] = "local"
    """Megatron's own layers, or Transformer Engine's, which computes a norm inside the next linear."""
    fp8: Recipe | None = None
    """Scaling of linears that compute in FP8; None: they do not."""
    fp8_parameters: bool = False
    """Whether the linears' weights are stored in FP8 (`--fp8-param-gather`)."""
    first_in_bf16: int = Field(default=0, ge=0)
    """Number of bf16 layers at the start of a model in FP8 (`--first-last-layers-bf16`)."""
    last_in_bf16: int = Field(default=0, ge=0)
    fp8_copies_kept: bool = True
    """Whether a checkpointed half keeps its last linear's FP8 copy of the input. False: that linear is recomputed as well, as in
    stock's recomputation, and only the half's input is kept."""
    moe_layers: tuple[Layers, ...] = ()
    """Layers whose MLP half is a mixture of experts."""
    shared_experts: bool = False
    moe_dispatcher: Dispatcher = "alltoall"
    """Token dispatcher of experts that are distributed over ranks. deepep, hybridep: backends of Megatron's flex dispatcher;
    allgather: gathers of all tokens."""
    moe_overlapped: bool = False
    """Whether exchanges of tokens overlap with another micro-batch (`--overlap-moe-expert-parallel-comm`): then forward and
    backward nodes are interleaved, and all recomputation is on demand."""
    moe_delayed: bool = False
    """Whether weight gradients are separate nodes there (`--delay-wgrad-compute`). It changes only seconds, so a run may differ.
    """
    moe_load: float = Field(default=1.0, gt=0)
    """Load that the plan is made for: the largest rank's share of tokens over a balanced share."""
    latent_attention: LatentSizes | None = None
    """Sizes of multi-latent attention, in all layers; None: the usual attention."""
    mtp: int = Field(default=0, ge=0, le=64)
    """Layers of multi-token prediction after the last layer. They keep everything."""
    opaque_layers: Mapping[OpaqueName, tuple[Layers, ...]] = {}
    """Layers with an opaque half, by its kind: it is kept whole, and has no hook."""
    captured: tuple[CapturedModule, ...] = ()
    """Modules of every layer that run as captured graphs (`--cuda-graph-impl transformer_engine`): kept whole, without hooks."""
    adapted: tuple[str, ...] = ()
    """Linears with a low-rank adapter, in forward order. With any, all other weights are frozen."""
    kinds: tuple[KindName, ...] = ()
    """Further kinds of halves, in every layer (`megatron_lynx.kinds`)."""

    @property
    def halves(self) -> Mapping[Half, Section]:
        return halves_of(self.facts)

    @property
    def facts(self) -> Facts:
        copies_go = not self.fp8_copies_kept
        return Facts(latent=self.latent_attention, kinds=self.kinds, captured=self.captured, copies_go=copies_go)

    @property
    def exchanges_in_windows(self) -> bool:
        return not (self.moe_overlapped or ROUTER in self.captured) and any(EXCHANGES[self.moe_dispatcher].values())

    def has_experts(self, layer: int) -> bool:
        return any(layer in span for span in self.moe_layers)

    def sections_of(self, layer: int) -> LayerKind:
        named = tuple(name for name, spans in self.opaque_layers.items() if any(layer in span for span in spans))
        facts = self.facts._replace(
            experts=self.has_experts(layer),
            shared_experts=self.shared_experts,
            dispatcher=self.moe_dispatcher,
            overlapped=self.moe_overlapped,
            opaque=named,
        )
        return sections_of(facts)


class ParallelFacts(Part):
    tensor: int = Field(ge=1)
    pipeline: int = Field(ge=1, le=MOST_LAYERS)
    chunks: int = Field(default=1, ge=1, le=MOST_LAYERS)
    """Model chunks on each stage (Megatron's virtual pipeline size); 1: plain 1F1B."""
    microbatch_group: int | None = Field(default=None, ge=1, le=1_000_000)
    """Consecutive micro-batches of one chunk; None: the number of stages."""
    sequence_parallel: bool = False
    expert: int = Field(default=1, ge=1, le=1_000_000)
    """Ranks among which experts are distributed, with tokens exchanged by all-to-all. With several, the exchanges are windows."""
    context: int = Field(default=1, ge=1, le=1_000_000)
    """Ranks among which a sequence is cut. With several, the core attention exchanges keys and values, and must be kept."""
    userbuffers: bool = False
    """Whether the launch has --tp-comm-overlap: no tensor-parallel windows, and no linear is recomputed (`plan.features`)."""

    @property
    def group(self) -> int:
        return self.microbatch_group or self.pipeline


class PackedFacts(Part):
    """Packed sequences: attention's seconds are proportional to the sum of the squared lengths."""

    squares_per_token: float = Field(ge=1)
    """Sum of the squared lengths over their sum, as planned."""
    core_share: float = Field(ge=0, le=1)
    """Share of the core attention in the predicted passes."""


class BatchFacts(Part):
    micro: int = Field(ge=1)
    microbatches: int = Field(ge=1, le=1_000_000)
    packed: PackedFacts | None = None
    """Is None if sequences are not packed, or attention's share is unknown."""


class Provenance(Part):
    """Origin of the plan. Digests are SHA-256 of the canonical JSON of the job and of the profile."""

    made_by: str
    job: str | None = None
    profile: str | None = None
    asked: str | None = None
    """The arguments of `megatron-lynx plan`: a job, or a cluster and a launch."""
    learned: Learned | None = None
    note: str | None = None


def without_options(asked: str, *options: str) -> str:
    words = shlex.split(asked)
    for option in options:
        while option in words[: words.index("--") if "--" in words else None]:
            at = words.index(option)
            del words[at : at + 2]
    return shlex.join(words)


SLACK = "allocator"
STATED = "stated"


class PlannedDevice(Part):
    memory_bytes: int = Field(ge=1)
    budget_bytes: int
    """Limit of PyTorch's allocations: the job's own, or without the reserve."""
    reserve_bytes: Mapping[str, Annotated[int, Field(ge=0)]] = {}
    """Memory left free, by part (from the cluster) and by user (from the job)."""
    optimizer_offload: float = Field(default=0.0, ge=0, le=1)
    """Share of a rank's optimizer that is stepped on the host (`--optimizer-offload-fraction`)."""

    @property
    def outside_bytes(self) -> int | None:
        known = {part: size for part, size in self.reserve_bytes.items() if part not in (SLACK, STATED)}
        return sum(known.values()) if known else None

    @property
    def slack_bytes(self) -> int | None:
        return self.reserve_bytes.get(SLACK)
