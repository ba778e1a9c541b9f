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

`Parts` serves stock's policies and plans alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

Moment = Literal[
    "forward", "loss", "head_backward", "backward", "embedding_backward", "reduction", "first_update", "update", "optimizer_made"
]

MOMENTS: tuple[Moment, ...] = get_args(Moment)


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
    """The binding moment, of a stage's peak."""
    totals: Mapping[Moment, int] = field(default_factory=dict, compare=False)
    """Total at every moment, of a stage's peak."""

    @property
    def always(self) -> int:
        """Return the bytes before any activation."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.fp8_weights + self.second_weights + self.second_gradients + self.rest + self.learned

    @property
    def before_step(self) -> int:
        """Return the bytes when a step begins, from the second step on: buffers stay."""
        return self.always + self.buffers

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
    """Parts of a stage's device memory, each at its largest."""

    states: StageMemory
    """Live at all moments: states, buffers, the rest."""
    embedding: int = 0
    """Dropout masks of the embedding, all micro-batches in flight."""
    messages: int = 0
    in_hand: int = 0
    head: int = 0
    """Inputs of final norm and output projection; the norm's is the layers' output."""
    predicting: int = 0
    """Activations of MTP layers, until the backward of the layers before them begins."""
    logits: int = 0
    logits_kept: int = 0
    """Saved by the loss, if the embedding's backward of the previous micro-batch runs after it; else 0."""
    loss_in_hand: int = 0
    """Head in pieces: results of earlier pieces, live with one piece's logits."""
    logits_gradient: int = 0
    head_in_hand: int = 0
    """Transients of the output projection's backward."""
    tied_gradient: int = 0
    """Tied weight: its gradient from the output projection, which waits for the embedding's."""
    embedding_gradient: int = 0
    reduced: int = 0
    """Gradients copied into one block for one reduction."""
    update_copies: int = 0
    update_in_hand: int = 0
    """Transients of an update, one parameter at a time."""
    optimizer_made: int = 0
    """Needed to build the optimizer, beyond its state (`cost.host_optimizer`)."""
    remembered: int = 0
    """Tensors of the last call that token dispatchers free only in the next one."""
    pool: int = 0
    """Saved by captured graphs for one chunk and micro-batch; their pool is not freed after backward."""
    pools: int = 0
    """The same for all chunks in flight."""
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
    flushed: bool = True
    """Whether no micro-batch is in flight in reductions and updates."""

    @property
    def fullest(self) -> StageMemory:
        """Return the peak moment; of equals the first."""
        totals = self._totals
        return replace(self.at(max(totals, key=lambda moment: totals[moment])), totals=totals)

    @property
    def peak_bytes(self) -> int:
        """Return the peak; faster than `fullest.total`."""
        return max(self._totals.values())

    @property
    def _totals(self) -> dict[Moment, int]:
        states = self.states.total
        return {moment: states + sum(self._beside_states(moment).values()) for moment in self.moments}

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Return the moments that the stage has: only the last has logits, only the first an embedding."""
        missing = {"loss", "head_backward"} if self.logits == 0 else set()
        missing |= {"embedding_backward"} if self.embedding_gradient == 0 else set()
        missing |= {"optimizer_made"} if self.optimizer_made == 0 else set()
        return tuple(moment for moment in MOMENTS if moment not in missing)

    def at(self, moment: Moment) -> StageMemory:
        beside: dict[str, Any] = self._beside_states(moment)
        return replace(self.states, moment=moment, **beside)

    @property
    def _at_loss(self) -> dict[str, int]:
        computed = {"logits": self.logits, "in_hand": self.loss_in_hand}
        after = {"logits": self.logits_kept, "in_hand": self.embedding_gradient + self.remembered} if self.logits_kept else {}
        return max(computed, after, key=lambda parts: sum(parts.values()))

    def _beside_states(self, moment: Moment) -> dict[str, int]:
        if moment == "optimizer_made":
            return {"update_copies": self.optimizer_made}
        if moment in ("reduction", "first_update", "update"):
            return self._between_batches(moment)
        running = self._running
        if moment in ("loss", "head_backward") and self.activations_at_loss is not None:
            running |= {"activations": self.activations_at_loss}
        if moment == "loss":
            return running | {"head": self.head + self.predicting} | self._at_loss
        if moment == "head_backward":
            return running | {"head": self.head + self.predicting, "logits": self.logits_gradient, "in_hand": self.head_in_hand}
        if moment == "backward":
            return running | {"recomputed": self.recomputed, "in_hand": self.in_hand + self.tied_gradient}
        if moment == "embedding_backward":
            other_activations = {"activations": self._activations_of_others + self.pool}
            return running | other_activations | {"in_hand": self.embedding_gradient + self.remembered}
        return running | {"head": self.head // 2} if moment == "forward" else running

    def _between_batches(self, moment: Moment) -> dict[str, int]:
        left = {} if self.flushed else self._running | {"activations": self._activations_of_others}
        if self.pools:  # graphs are refused without flushes
            left = {"activations": self.pools}
        if moment == "reduction":
            return left | {"in_hand": self.reduced + self.remembered}
        return left | {"update_copies": self.update_copies, "in_hand": self.update_in_hand + self.remembered}

    @property
    def _running(self) -> dict[str, int]:
        """Return the parts of all micro-batches in flight."""
        return {name: getattr(self, name) for name in ("activations", "staging", "embedding", "messages")}

    @property
    def _activations_of_others(self) -> int:
        """Return the activations after one micro-batch's backward."""
        rest = self.activations - self.chunk if self.activations_behind_backward is None else self.activations_behind_backward
        return max(0, rest)
