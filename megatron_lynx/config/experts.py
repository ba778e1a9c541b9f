"""Mixtures of experts, as a job file states them.

experts: {count: 8, per_token: 2, ffn: 14336}                                   Mixtral 8x7B: in every layer
experts: {count: 64, per_token: 6, ffn: 1408, shared_ffn: 2816, layers: [2-27]} DeepSeek-V2-Lite's: the first layer has an MLP
experts: {count: 8, per_token: 2, ffn: 14336, load: 1.5}                        one rank's experts get half as many rows again
experts: {count: 8, per_token: 2, ffn: 14336, holds: 2}                         what they keep is counted for twice as many rows
experts: {count: 128, per_token: 8, ffn: 768, dispatcher: deepep}               Megatron's flex dispatcher with DeepEP
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from megatron_lynx.anatomy import Facts, Section, sections_of
from megatron_lynx.kinds.experts.section import Dispatcher
from megatron_lynx.validation import Part

BALANCED = 1.0
"""The load of experts where every rank's get as many rows."""

BESIDE_EXCHANGES = ("overlapped", "shared_beside")
"""What Megatron refuses where tokens are gathered."""

SPAN = re.compile(r"([1-9]\d*)(?:-([1-9]\d*))?")


def _frozen(value: Any) -> Any:
    """A file's list is checked as Python's, by then: `Model` looks at its data before they are validated."""
    return tuple(value) if isinstance(value, list) else value


Layers = Annotated[Literal["all"] | Annotated[int, Field(ge=1)] | tuple[int | str, ...], BeforeValidator(_frozen)]


class Experts(Part):
    """What stands in place of a layer's MLP: a router, and experts of which every token passes some."""

    count: int = Field(ge=1)
    """Experts of one layer, over all ranks (E)."""
    per_token: int = Field(ge=1)
    """Experts that each token passes (k)."""
    ffn: int = Field(ge=1)
    """Width inside one expert; with SwiGLU, of each of the two halves."""
    shared_ffn: int = Field(default=0, ge=0)
    """Width inside the shared experts together, which every token passes; 0: none."""
    shared_gate: bool = False
    """Whether what shared experts return is multiplied with a gate (`--moe-shared-expert-gate`)."""
    weighted_relu: bool = False
    """Whether one kernel computes squared ReLU and its product with the probabilities (`--use-fused-weighted-squared-relu`)."""
    scores: float = Field(default=1.0, ge=0.0, le=16.0)
    """Numbers in fp32 that the router saves of a token for each expert: 1 for an auxiliary loss, more for other scores."""
    layers: Layers = "all"
    """Which layers have them. n: the first of every n, as Megatron's --moe-layer-freq; a list of layers (3) and ranges (5-8)."""
    load: float = Field(default=BALANCED, gt=0.0, le=1_000.0)
    """How many times as many rows the fullest rank's experts get as they would if all ranks got as many; 1: a balanced load. What
    they keep, and how long they take, grows with it."""
    drops: bool = False
    """Whether tokens beyond a capacity are dropped (`--moe-expert-capacity-factor`). Then a load may be below 1."""
    holds: float | None = Field(default=None, gt=0.0, le=1_000.0)
    """The load for which bytes are counted, while seconds are those of `load`: a plan then fits up to it, whatever the router
    does. None: that of `load`."""
    whole: bool = False
    """Whether plans keep all of the half that has them, on the device: Megatron may run them so that nothing inside can be made
    again (`--moe-shared-expert-overlap`, grouped GEMMs that are not Transformer Engine's)."""

    shared_beside: bool = False
    """Whether shared experts compute beside the exchanges, on their own stream (`--moe-shared-expert-overlap`). Megatron runs
    them inside its dispatcher then, so `whole` is needed beside it."""

    filled: bool = False
    """Whether routers fill up what each expert gets to a multiple that FP8 needs (`--moe-router-padding-for-quantization`).
    Otherwise rows are filled up before the experts' GEMMs."""

    dispatcher: Dispatcher = "alltoall"
    """Who brings tokens to experts on other ranks; deepep, hybridep: --moe-token-dispatcher-type flex with this backend.
    allgather, which is Megatron's default: every rank gathers all tokens."""
    multiprocessors: int | None = Field(default=None, ge=2)
    """How many of them one of its kernels takes while tokens travel (`--moe-flex-dispatcher-num-sms`); None: as many as Megatron
    sets. None are counted for the all-to-all's."""
    overlapped: bool = False
    """Whether tokens travel beside the computing of another micro-batch (`--overlap-moe-expert-parallel-comm`)."""
    delayed: bool = False
    """Whether gradients of weights are nodes of their own there (`--delay-wgrad-compute`); of no meaning elsewhere."""

    @model_validator(mode="after")
    def _sensible(self) -> Experts:
        problems = []
        if self.per_token > self.count:
            problems.append(f"per_token ({self.per_token}) must be at most count ({self.count})")
        if self.shared_gate and not self.shared_ffn:
            problems.append("shared_gate true needs shared_ffn, found 0")
        if self.shared_beside and not (self.shared_ffn and self.whole and not self.overlapped):
            found = f"found {self.shared_ffn}, {str(self.whole).lower()} and {str(self.overlapped).lower()}"
            problems.append(f"shared_beside true needs shared_ffn, whole: true and overlapped: false, {found}")
        if self.dispatcher == "allgather" and (beside := [name for name in BESIDE_EXCHANGES if getattr(self, name)]):
            problems.append(f"{' and '.join(beside)} true needs dispatcher alltoall, deepep or hybridep, found allgather")
        if self.load < BALANCED and not self.drops:
            problems.append(f"load ({self.load:g}) must be at least 1 where no token is dropped (drops false)")
        if self.holds is not None and self.holds < self.load:
            problems.append(f"holds ({self.holds:g}) must be at least load ({self.load:g})")
        if isinstance(self.layers, tuple):
            problems += [
                f"layers has {span!r}, needed a layer from 1 on (3) or a range (5-8)"
                for span in self.layers
                if not _numbers(span)
            ]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def one_after_the_other(self) -> Experts:
        """The same where tokens do not travel beside anything."""
        return self.model_copy(update={"overlapped": False, "delayed": False})

    @property
    def held_load(self) -> float:
        """The load for which bytes are counted."""
        return self.load if self.holds is None else self.holds

    def numbers(self, layers: int) -> frozenset[int]:
        """The layers that have experts, of a model with so many, by Megatron's numbers (from 1)."""
        return numbers_of(self.layers, layers)

    @property
    def section(self) -> Section:
        """What fills the MLP half of a layer that has them."""
        facts = Facts(experts=True, shared_experts=bool(self.shared_ffn), dispatcher=self.dispatcher, overlapped=self.overlapped)
        return sections_of(facts)[1]

    def most_load(self, ranks: int) -> float:
        """The load of one of so many ranks if every token went to as many of its experts as it can."""
        return ranks * min(1.0, self.count // ranks / self.per_token)

    def beyond(self, layers: int) -> int | None:
        """The first layer that is named, one by one or in a range, of those that a model with so many does not have."""
        spans = [_numbers(span) for span in self.layers] if isinstance(self.layers, tuple) else []
        return min((max(span.start, layers + 1) for span in spans if span.stop - 1 > layers), default=None)


def as_spans(numbers: Iterable[int]) -> tuple[int | str, ...]:
    """Layer numbers as plans and jobs write them: `(1, "3-5")`."""
    runs = (list(run) for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]))
    ends = ((run[0][1], run[-1][1]) for run in runs)
    return tuple(first if first == last else f"{first}-{last}" for first, last in ends)


@lru_cache(maxsize=256)
def numbers_of(stated: Literal["all"] | int | tuple[int | str, ...], layers: int) -> frozenset[int]:
    """The layers that a file names, of a model with so many, by Megatron's numbers (from 1)."""
    if isinstance(stated, tuple):
        spans = (_numbers(span) for span in stated)
        return frozenset(number for span in spans for number in range(span.start, min(span.stop, layers + 1)))
    return frozenset(range(1, layers + 1, 1 if stated == "all" else stated))


def _numbers(span: int | str) -> range:
    """The layer numbers of a range; empty where the text is none."""
    match = SPAN.fullmatch(str(span).strip().replace(" ", ""))
    return range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
