"""Moments at which a stage's device may reach its peak; parts that are never live together are not added up.

    forward              the last micro-batch in flight has run forward
    loss                 last stage: the loss, or the start of its backward: logits in fp32 and in the model's type. The combined
                         schedule on one stage then runs the embedding's backward of the previous micro-batch
    head_backward        last stage: the output projection's backward, with the logits' gradient
    backward             a layer's backward, after its recomputation; the logits are freed
    embedding_backward   first stage: the micro-batch's layers are freed, the embedding's gradient is one dense block
    reduction            gradients are reduced; those shared by tensor-parallel ranks are copied into one block
    first_update         the optimizer allocates its state, and fp32 copies of smaller types
    update               every later update
    optimizer_made       before the first step a partly offloaded optimizer is built from whole parameters

Without flushes the pipeline never drains: reductions and updates have all micro-batches in flight but one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

Moment = Literal[
    "forward", "loss", "head_backward", "backward", "embedding_backward", "reduction", "first_update", "update", "optimizer_made"
]

MOMENTS: tuple[Moment, ...] = get_args(Moment)
BETWEEN_BATCHES: tuple[Moment, ...] = ("reduction", "first_update", "update")


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of one stage, by kind, at one moment."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    staging: int = 0
    embedding: int = 0
    head: int = 0
    logits: int = 0
    recomputed: int = 0
    rest: int = 0
    fp8_weights: int = 0
    second_weights: int = 0
    second_gradients: int = 0
    in_hand: int = 0
    messages: int = 0
    buffers: int = 0
    update_copies: int = 0
    learned: int = 0
    """Observed by a run besides all counted kinds; below 0 if it used less."""
    moment: Moment = field(default="forward", compare=False)
    totals: Mapping[Moment, int] = field(default_factory=dict, compare=False)

    @property
    def always(self) -> int:
        states = self.parameters + self.gradients + self.optimizer
        return states + self.fp8_weights + self.second_weights + self.second_gradients + self.rest + self.learned

    @property
    def kinds(self) -> dict[str, int]:
        return {name: size for name, size in vars(self).items() if name not in ("moment", "totals")}

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def named(self) -> dict[str, int]:
        return {"total": self.total, **self.kinds}


@dataclass(frozen=True)
class Parts:
    """Device memory of a stage by moment and kind. Moments that the stage does not have are missing."""

    states: StageMemory
    """Live at all moments: states, buffers, the rest."""
    beside: Mapping[Moment, Mapping[str, int]]
    running: Mapping[str, int] = field(default_factory=dict)
    """Part of `beside` while micro-batches are in flight: messages, dropout masks of the embedding."""
    activations: int = 0
    """Activations of all chunks in flight; with offloading, those that stay."""
    activations_at_loss: int | None = None
    """The same at the loss, if the chunk before it differs from the others."""
    staging: int = 0
    recomputed: int = 0
    chunk: int = 0
    """Activations of one chunk and micro-batch, which are freed by the embedding's backward."""
    activations_behind_backward: int | None = None
    """Activations left after one micro-batch's backward, operands of delayed weight gradients included; default: all but `chunk`.
    """
    pool: int = 0
    """Saved by captured graphs for one chunk and micro-batch; their pool is not freed after backward."""
    pools: int = 0
    """The same for all chunks in flight."""
    flushed: bool = True
    """Whether no micro-batch is in flight in reductions and updates."""

    @property
    def fullest(self) -> StageMemory:
        totals = self._totals
        return replace(self.at(max(totals, key=lambda moment: totals[moment])), totals=totals)

    @property
    def peak_bytes(self) -> int:
        return max(self._totals.values())

    @property
    def _totals(self) -> dict[Moment, int]:
        states = self.states.total
        return {moment: states + sum(self._beside_states(moment).values()) for moment in self.moments}

    @property
    def moments(self) -> tuple[Moment, ...]:
        return tuple(self.beside)

    def at(self, moment: Moment) -> StageMemory:
        beside: dict[str, Any] = self._beside_states(moment)
        return replace(self.states, moment=moment, **beside)

    def more(self, moment: Moment, in_hand: int) -> Parts:
        sizes = self.beside[moment]
        return replace(self, beside={**self.beside, moment: {**sizes, "in_hand": sizes["in_hand"] + in_hand}})

    def _beside_states(self, moment: Moment) -> dict[str, int]:
        left = self.activations - self.chunk if self.activations_behind_backward is None else self.activations_behind_backward
        layers = {"activations": self.activations, "staging": self.staging}
        if moment in BETWEEN_BATCHES:
            layers = {} if self.flushed else {**self.running, **layers, "activations": max(0, left)}
            layers = {"activations": self.pools} if self.pools else layers  # graphs are refused without flushes
        elif moment == "optimizer_made":
            layers = {}
        elif moment == "backward":
            layers["recomputed"] = self.recomputed
        elif moment == "embedding_backward":
            layers["activations"] = max(0, left) + self.pool
        elif moment != "forward" and self.activations_at_loss is not None:
            layers["activations"] = self.activations_at_loss
        return {**layers, **self.beside[moment]}
