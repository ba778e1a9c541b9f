"""Halves that only some layers of a job have: a mixture of experts, opaque ones, and kinds with their sizes.

Bytes and FLOPs are per token and weights per layer, over all tensor-parallel ranks, which share them equally."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_lynx.anatomy import Facts, Section, sections_of
from megatron_lynx.kinds.experts.section import Dispatcher
from megatron_lynx.kinds.mamba.section import DELTA_NET, MAMBA, DeltaSizes, MambaSizes
from megatron_lynx.kinds.opaque.section import NOTHING, OpaqueName
from megatron_lynx.validation import Part

BALANCED = 1.0
BESIDE_EXCHANGES = ("overlapped", "shared_beside")
"""Options that Megatron refuses with the allgather dispatcher."""

SPAN = re.compile(r"([1-9]\d*)(?:-([1-9]\d*))?")
AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Converts lists to tuples: `Model` reads its data before validation, so strict types see Python values."""

Layers = Annotated[Literal["all"] | Annotated[int, Field(ge=1)] | tuple[int | str, ...], AS_TUPLE]


class Experts(Part):
    count: int = Field(ge=1)
    """Experts per layer, over all ranks (E)."""
    per_token: int = Field(ge=1)
    """Experts per token (k)."""
    ffn: int = Field(ge=1)
    """Intermediate width of one expert; with SwiGLU, of each of the two halves."""
    latent: int | None = Field(default=None, ge=1)
    """Width of tokens on their way to experts and in them (`--moe-latent-size`), between two projections; None: the layer's own.
    Plans keep such experts whole."""
    shared_ffn: int = Field(default=0, ge=0)
    """Total intermediate width of the shared experts; 0: none."""
    shared_gate: bool = False
    """Whether the output of shared experts is multiplied by a gate (`--moe-shared-expert-gate`)."""
    weighted_relu: bool = False
    """Whether squared ReLU and its product with the probabilities are one kernel (`--use-fused-weighted-squared-relu`)."""
    scores: float = Field(default=1.0, ge=0.0, le=16.0)
    """fp32 values per token and expert that the router saves: 1 for an auxiliary loss, more for other score functions."""
    layers: Layers = "all"
    """Layers with experts. n: the first of every n, as Megatron's --moe-layer-freq; or a list of layers (3) and ranges (5-8)."""
    load: float = Field(default=BALANCED, gt=0.0, le=1_000.0)
    """Rows of the fullest rank's experts, relative to a balanced load of 1. Scales the experts' activations and time."""
    drops: bool = False
    """Whether tokens beyond a capacity are dropped (`--moe-expert-capacity-factor`). Allows loads below 1."""
    holds: float | None = Field(default=None, gt=0.0, le=1_000.0)
    """Load for which memory is counted, while `load` gives the time: the plan fits up to this load; None: as `load`."""
    whole: bool = False
    """Whether plans keep the experts' half whole, on the device, because Megatron cannot recompute inside it
    (`--moe-shared-expert-overlap`, grouped GEMMs that are not Transformer Engine's)."""
    shared_beside: bool = False
    """Whether shared experts overlap the token exchange on their own stream (`--moe-shared-expert-overlap`). Megatron runs them
    inside its dispatcher then, so this needs `whole`."""
    filled: bool = False
    """Whether routers pad each expert's rows to a multiple that FP8 needs (`--moe-router-padding-for-quantization`). Otherwise
    rows are padded before the experts' GEMMs."""
    dispatcher: Dispatcher = "alltoall"
    """Megatron's token dispatcher; deepep, hybridep: --moe-token-dispatcher-type flex with this backend. allgather (Megatron's
    default): every rank gathers all tokens."""
    multiprocessors: int | None = Field(default=None, ge=2)
    """Multiprocessors of one dispatch kernel (`--moe-flex-dispatcher-num-sms`); None: Megatron's default. Ignored with alltoall.
    """
    overlapped: bool = False
    """Whether token exchanges overlap the computation of another micro-batch (`--overlap-moe-expert-parallel-comm`)."""
    delayed: bool = False
    """Whether weight gradients are separate nodes of that schedule (`--delay-wgrad-compute`). Unused without `overlapped`."""

    def _problems(self) -> Iterator[str]:
        if self.per_token > self.count:
            yield f"per_token ({self.per_token}) must be at most count ({self.count})"
        if self.shared_gate and not self.shared_ffn:
            yield "shared_gate true needs shared_ffn, found 0"
        if self.latent is not None and not self.whole:
            yield f"latent ({self.latent}) needs whole: true, found false"
        if self.shared_beside and not (self.shared_ffn and self.whole and not self.overlapped):
            finding = f"found {self.shared_ffn}, {str(self.whole).lower()} and {str(self.overlapped).lower()}"
            yield f"shared_beside true needs shared_ffn, whole: true and overlapped: false, {finding}"
        if self.dispatcher == "allgather" and (beside := [name for name in BESIDE_EXCHANGES if getattr(self, name)]):
            yield f"{' and '.join(beside)} true needs dispatcher alltoall, deepep or hybridep, found allgather"
        if self.load < BALANCED and not self.drops:
            yield f"load ({self.load:g}) must be at least 1 where no token is dropped (drops false)"
        if self.holds is not None and self.holds < self.load:
            yield f"holds ({self.holds:g}) must be at least load ({self.load:g})"
        if isinstance(self.layers, tuple):
            yield from (
                f"layers has {span!r}, needed a layer from 1 on (3) or a range (5-8)"
                for span in self.layers
                if not _numbers(span)
            )

    @property
    def one_after_the_other(self) -> Experts:
        return self.model_copy(update={"overlapped": False, "delayed": False})

    @property
    def padded(self) -> bool:
        """Whether every expert gets its capacity (`--moe-pad-expert-input-to-capacity`), so that the host waits for no counts."""
        return self.drops and self.holds is None

    @property
    def held_load(self) -> float:
        return self.load if self.holds is None else self.holds

    def numbers(self, layers: int) -> frozenset[int]:
        return numbers_of(self.layers, layers)

    @property
    def section(self) -> Section:
        facts = Facts(experts=True, shared_experts=bool(self.shared_ffn), dispatcher=self.dispatcher, overlapped=self.overlapped)
        return sections_of(facts)[1]

    def most_load(self, ranks: int) -> float:
        """Return the load of one of `ranks` ranks if every token chose as many of its experts as possible."""
        return ranks * min(1.0, self.count // ranks / self.per_token)


def as_spans(numbers: Iterable[int]) -> tuple[int | str, ...]:
    """Return layer numbers in the notation of plans and jobs: `(1, "3-5")`."""
    runs = (list(run) for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]))
    ends = ((run[0][1], run[-1][1]) for run in runs)
    return tuple(first if first == last else f"{first}-{last}" for first, last in ends)


@lru_cache(maxsize=256)
def numbers_of(stated: Literal["all"] | int | tuple[int | str, ...], layers: int) -> frozenset[int]:
    if isinstance(stated, tuple):
        spans = (_numbers(span) for span in stated)
        return frozenset(number for span in spans for number in range(span.start, min(span.stop, layers + 1)))
    return frozenset(range(1, layers + 1, 1 if stated == "all" else stated))


def first_beyond(stated: Literal["all"] | int | tuple[int | str, ...], layers: int) -> int | None:
    spans = [_numbers(span) for span in stated] if isinstance(stated, tuple) else []
    return min((max(span.start, layers + 1) for span in spans if span.stop - 1 > layers), default=None)


def _numbers(span: int | str) -> range:
    match = SPAN.fullmatch(str(span).strip().replace(" ", ""))
    return range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)


MARGIN = 1.15


class Opaque(Part):
    """An opaque half of some layers, kept whole, on the device, or one that is planned from its sizes."""

    kind: OpaqueName
    """Its kind; `own_attention` and `own_mlp`: a fork's own module; `no_attention` and `no_mlp`: the layer has no such half."""
    layers: Layers = "all"
    """Its layers. n: the first of every n; or a list of layers (3) and ranges (5-8)."""
    parameters: int = Field(default=0, ge=0)
    """Weights, split over tensor-parallel ranks."""
    kept_bytes: int = Field(default=0, ge=0)
    """Bytes per token kept from forward to backward, besides the half's input and its norm's saved tensors."""
    in_hand_bytes: int = Field(default=0, ge=0)
    """Peak transient bytes per token in backward."""
    flops: int = Field(default=0, ge=0)
    """FLOPs per token in forward."""
    margin: float = Field(default=MARGIN, ge=1.0, le=10.0)
    """Factor on the bytes, which were not measured."""
    delta: DeltaSizes | None = None
    mamba: MambaSizes | None = None

    def _problems(self) -> Iterator[str]:
        for name, kind in (("delta", DELTA_NET.name), ("mamba", MAMBA.name)):
            if (getattr(self, name) is not None) != (self.kind == kind):
                yield f"{name} is given with kind {kind}, and only with it; found kind {self.kind}"

    @property
    def nothing(self) -> bool:
        return self.kind in NOTHING

    def numbers(self, layers: int) -> frozenset[int]:
        return numbers_of(self.layers, layers)


def gated_attention(hidden: int, element: int, *, queries: int, keys: int, seq: int) -> dict[str, Any]:
    """Return the figures of attention with an output gate, by widths of queries and keys, read in `SelfAttention` with
    `attention_output_gate`. They were not measured, so bytes are multiplied by `MARGIN`.

    Saved: output of the linear; queries and keys before and after their norm and rotated; values; result; gate, its sigmoid, and
    the product. Transient in backward: the gradients of the widest of these.
    """
    made = 2 * queries + 2 * keys
    return {
        "kind": "gated_attention",
        "parameters": hidden * (made + queries),
        "kept_bytes": element * (9 * queries + 6 * keys),
        "in_hand_bytes": element * (made + 3 * queries + 2 * keys),
        "flops": 2 * hidden * (made + queries) + 2 * seq * queries,
    }
