"""What a plan was made for: model, layout and batch, as far as they decide whether it fits a run; and where it came from.

what PyTorch reports of a device = reserve: outside PyTorch (context, libraries, nccl)  +  its allocator's slack  +  what was
planned with
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_lynx.anatomy import Facts, Half, LayerKind, Section, halves_of, sections_of
from megatron_lynx.fp8_recipes import Recipe
from megatron_lynx.kinds.captured import ROUTER, CapturedModule
from megatron_lynx.kinds.experts.section import EXCHANGES, Dispatcher
from megatron_lynx.kinds.latent.sizes import LatentSizes
from megatron_lynx.kinds.opaque.section import OpaqueName
from megatron_lynx.kinds.sections import KindName
from megatron_lynx.learned import Learned
from megatron_lynx.plan.layer_range import MOST_LAYERS, Layers
from megatron_lynx.validation import Part

IN_BF16 = ("first_in_bf16", "last_in_bf16")
"""The keys that say how many layers at the ends of a model in FP8 compute in bf16."""


class ModelFacts(Part):
    """The model that the plan was made for, as far as it decides what fits."""

    layers: int = Field(ge=1, le=MOST_LAYERS)
    hidden: int = Field(ge=1)
    ffn: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_groups: int = Field(ge=1)
    seq: int = Field(ge=1)
    implementation: Literal["local", "transformer_engine"] = "local"
    """Whether layers are Megatron's own or Transformer Engine's, which computes a norm inside the linear behind it."""
    fp8: Recipe | None = None
    """How linears that compute in FP8 find their scales. None: they do not compute in FP8."""
    fp8_parameters: bool = False
    """Whether the linears' weights are held in FP8 (`--fp8-param-gather`)."""
    first_in_bf16: int = Field(default=0, ge=0)
    """How many layers from the first on compute in bf16 where the others do in FP8 (`--first-last-layers-bf16`)."""
    last_in_bf16: int = Field(default=0, ge=0)
    """How many up to the last one do."""
    fp8_copies_kept: bool = True
    """Whether a checkpointed half keeps the copy that its last linear has of what it reads. False: that linear runs again, too,
    as under stock's recomputation, and nothing but the input is kept."""

    moe_layers: tuple[Layers, ...] = ()
    """Layers whose MLP half is a mixture of experts. Empty: there are none."""
    shared_experts: bool = False
    """Whether these have shared experts, of which a rule may speak."""
    moe_dispatcher: Dispatcher = "alltoall"
    """Who brings tokens to them, where they are shared out over ranks; deepep, hybridep: Megatron's flex dispatcher with this
    backend; allgather: its gathers of all tokens."""
    moe_overlapped: bool = False
    """Whether tokens travel beside the computing of another micro-batch (`--overlap-moe-expert-parallel-comm`): then forwards and
    backwards run in turn, node by node, and everything is replayed on demand."""
    moe_delayed: bool = False
    """Whether gradients of weights are nodes of their own there (`--delay-wgrad-compute`). It decides seconds alone, so a run is
    not held to it."""
    moe_load: float = Field(default=1.0, gt=0)
    """The load that the plan was made for: the largest rank's share of tokens over the share that each would have if all experts
    were asked as often."""

    latent_attention: LatentSizes | None = None
    """The sizes of multi-latent attention, which all layers have then. None: they have the usual attention."""
    mtp: int = Field(default=0, ge=0, le=64)
    """Layers of multi-token prediction behind the last layer. No rule speaks of them: they keep everything."""
    opaque_layers: Mapping[OpaqueName, tuple[Layers, ...]] = {}
    """Layers one half of which nobody looks into, by what it is: it is kept whole, and no hook is on it."""
    captured: tuple[CapturedModule, ...] = ()
    """The modules of every layer that run as captured graphs (`--cuda-graph-impl transformer_engine`): they are kept whole, and
    no hook is in them."""
    kinds: tuple[KindName, ...] = ()
    """Kinds of what fills a half, in every layer, that no other key speaks of (`megatron_lynx.kinds`)."""

    @property
    def halves(self) -> Mapping[Half, Section]:
        """What fills the halves of a layer without experts."""
        return halves_of(self.facts)

    @property
    def facts(self) -> Facts:
        """What decides which kinds fill the halves of layers without experts."""
        te, copies_go = self.implementation == "transformer_engine", not self.fp8_copies_kept
        return Facts(te=te, latent=self.latent_attention, kinds=self.kinds, captured=self.captured, copies_go=copies_go)

    @property
    def in_bf16(self) -> dict[str, int]:
        """How many layers compute in bf16 at each end of a model in FP8, by key."""
        return {name: getattr(self, name) for name in IN_BF16}

    @model_validator(mode="after")
    def _who_has_fp8(self) -> ModelFacts:
        if self.fp8 is not None and self.implementation != "transformer_engine":
            raise ValueError(f"fp8 ({self.fp8}) needs implementation transformer_engine, found {self.implementation}")
        for name, found in (("fp8_parameters", self.fp8_parameters), *self.in_bf16.items()):
            if found and self.fp8 is None:
                raise ValueError(f"{name} is {str(found).lower()}, needed fp8: how scales are found")
        if self.fp8 is None and not self.fp8_copies_kept:
            raise ValueError("fp8_copies_kept is false, needed fp8: how scales are found")
        return self

    @model_validator(mode="after")
    def _whose_shared_experts(self) -> ModelFacts:
        if self.shared_experts and not self.moe_layers:
            raise ValueError("shared_experts is true, needed moe_layers: the layers that have them")
        if self.moe_delayed and not self.moe_overlapped:
            raise ValueError("moe_delayed is true, needed moe_overlapped: true")
        return self

    @property
    def exchanges_in_windows(self) -> bool:
        """Whether experts that are shared out over ranks have windows in which tokens travel."""
        return not (self.moe_overlapped or ROUTER in self.captured) and any(EXCHANGES[self.moe_dispatcher].values())

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP half is a mixture of experts."""
        return any(layer in span for span in self.moe_layers)

    def sections_of(self, layer: int) -> LayerKind:
        """What fills the halves of a layer."""
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
    """The layout that the plan was made for."""

    tensor: int = Field(ge=1)
    pipeline: int = Field(ge=1, le=MOST_LAYERS)
    chunks: int = Field(default=1, ge=1, le=MOST_LAYERS)
    """Model chunks on each stage (Megatron's virtual pipeline size); 1: plain 1F1B."""
    microbatch_group: int | None = Field(default=None, ge=1, le=1_000_000)
    """Micro-batches that pass one chunk before the next one has its turn; none: as many as stages."""
    sequence_parallel: bool = False
    expert: int = Field(default=1, ge=1, le=1_000_000)
    """Ranks over which experts are shared out, where their tokens travel by all-to-all: with several these are windows, which
    rules may name in layers of experts."""
    context: int = Field(default=1, ge=1, le=1_000_000)
    """Ranks among which a sequence is cut; among several the core attention exchanges keys and values, and must be kept."""
    userbuffers: bool = False
    """Whether the launch has --tp-comm-overlap: linears exchange inside their GEMMs, so there are no tensor-parallel windows, and
    no linear runs again (`plan.userbuffers`)."""

    @property
    def group(self) -> int:
        """The size of those groups."""
        return self.microbatch_group or self.pipeline


class PackedFacts(Part):
    """Packed sequences, as far as seconds go by them: attention goes with the sum of the squares of their lengths."""

    squares_per_token: float = Field(ge=1)
    """The sum of the squares of the lengths that were planned with, over the sum of these lengths."""
    core_share: float = Field(ge=0, le=1)
    """What the core attention takes of the predicted passes."""


class BatchFacts(Part):
    """Micro-batch size, and how many micro-batches a pipeline runs per step."""

    micro: int = Field(ge=1)
    microbatches: int = Field(ge=1, le=1_000_000)
    packed: PackedFacts | None = None
    """None: sequences are not packed, or the plan does not say what attention takes."""


class Provenance(Part):
    """Where the plan came from. Digests are SHA-256 of the canonical JSON of the job and of the profile."""

    made_by: str
    job: str | None = None
    profile: str | None = None
    asked: str | None = None
    """The words with which `megatron-lynx plan` was asked for it: a job, or a cluster and a launch."""
    learned: Learned | None = None
    """What a run before had taught. None: nothing."""
    note: str | None = None


def without_options(asked: str, *options: str) -> str:
    """The words of `Provenance.asked` without these options and their values."""
    words = shlex.split(asked)
    for option in options:
        while option in words[: words.index("--") if "--" in words else None]:
            at = words.index(option)
            del words[at : at + 2]
    return shlex.join(words)


SLACK = "allocator"
"""The part of a reserve that is PyTorch's own: reserved, and not allocated."""
STATED = "stated"
"""A reserve in one piece, of which nobody knows the parts."""


class PlannedDevice(Part):
    """Bytes of one device. What a plan expects to be used of it is each stage's prediction."""

    memory_bytes: int = Field(ge=1)
    """As PyTorch reports it."""
    budget_bytes: int
    """What the plan might use, by what PyTorch allocates: a job's own figure, or what the reserve leaves."""
    reserve_bytes: Mapping[str, Annotated[int, Field(ge=0)]] = {}
    """What the cluster's description leaves alone, by part; and what the job leaves to others, by whom."""
    optimizer_offload: float = Field(default=0.0, ge=0, le=1)
    """Share of a rank's optimizer that is stepped on the host (`--optimizer-offload-fraction`)."""

    @property
    def outside_bytes(self) -> int | None:
        """What is expected to be used by others than PyTorch's allocator; None where that is not known."""
        known = {part: size for part, size in self.reserve_bytes.items() if part not in (SLACK, STATED)}
        return sum(known.values()) if known else None

    @property
    def slack_bytes(self) -> int | None:
        """What the allocator is expected to have reserved and not allocated; None where that is not known."""
        return self.reserve_bytes.get(SLACK)
