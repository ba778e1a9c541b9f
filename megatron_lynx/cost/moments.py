"""When a device of a stage is fullest: its peak is a maximum over moments, because much of what it holds is never there together.

    forward              the last of its micro-batches in flight has run forward
    loss                 last stage: the loss is computed, or its backward begins: the logits in fp32 and in the model's type. In
                         the combined schedule on one stage the embedding's backward of the micro-batch before comes behind it
    head_backward        last stage: the output projection's backward, with the logits' gradient
    backward             a layer runs backward, made again before where it was not kept: the logits are gone
    embedding_backward   first stage: that micro-batch's layers are gone, the embedding's gradient is made as one dense block
    reduction            gradients are reduced; those that tensor-parallel ranks share are copied side by side
    first_update         the optimizer allocates its state, and copies in fp32 what it is given in less
    update               every later one: its state is there all the time
    optimizer_made       with an optimizer that is on the host in part: before the first step it is made of whole parameters

Without flushes all micro-batches in flight but one are there in reductions and updates, too: the pipeline never gets empty.

What is held of the layers at each is the same for stock's policies and for plans, so both are counted by `Parts`.
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
    """Bytes on one device of one stage, by kind, at one moment: what `total` adds up is there at once."""

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
    """What a run was seen to hold beside all that is counted; below 0 where it held less."""
    moment: Moment = field(default="forward", compare=False)
    """Which moment this is: of a stage's peak, the one that binds."""
    totals: Mapping[Moment, int] = field(default_factory=dict, compare=False)
    """What is held at every moment that the stage has, of a stage's peak."""

    @property
    def always(self) -> int:
        """What is held before there is any activation."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.fp8_weights + self.second_weights + self.second_gradients + self.rest + self.learned

    @property
    def before_step(self) -> int:
        """What is held when a step begins, from the second one on: buffers were made in the first, and stay."""
        return self.always + self.buffers

    @property
    def kinds(self) -> dict[str, int]:
        """Every kind of bytes, by name."""
        return {name: size for name, size in vars(self).items() if name not in ("moment", "totals")}

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def named(self) -> dict[str, int]:
        """The total, then every kind."""
        return {"total": self.total, **self.kinds}


@dataclass(frozen=True)
class Parts:
    """Everything that a device of one stage ever holds, each part as large as it gets, whenever that is."""

    states: StageMemory
    """What is there at all moments: states, buffers, the rest."""
    embedding: int = 0
    """Masks of the embedding's dropout, of all micro-batches in flight."""
    messages: int = 0
    """Buffers of messages between stages, while micro-batches run."""
    in_hand: int = 0
    """What a layer's backward has in hand beside what the layer keeps."""
    head: int = 0
    """What final norm and output projection read; the norm's part is what the layers put out."""
    predicting: int = 0
    """What layers that predict more tokens keep, until the backward of those before them begins."""
    logits: int = 0
    """All copies of one micro-batch's logits while the loss is computed."""
    logits_kept: int = 0
    """What the loss keeps of them, where the embedding's backward of the micro-batch before runs behind it; else 0."""
    loss_in_hand: int = 0
    """Of a head in pieces: what was made of the pieces before, beside the logits of one."""
    logits_gradient: int = 0
    head_in_hand: int = 0
    """What the output projection's backward has in hand beside the gradient of the logits."""
    tied_gradient: int = 0
    """Where one weight is both, what the output projection's backward made of its gradient waits for the embedding's."""
    embedding_gradient: int = 0
    reduced: int = 0
    """Gradients side by side, to be reduced in one call."""
    update_copies: int = 0
    update_in_hand: int = 0
    """What an update needs for one parameter after the other."""
    optimizer_made: int = 0
    """What making the optimizer takes beyond its state (`cost.host_optimizer`)."""
    remembered: int = 0
    """What dispatchers of tokens keep of their last call, when what its backward reads is gone: they let go of it in the next."""
    pool: int = 0
    """Of one chunk's micro-batch what captured graphs keep: their pool holds it when its backward is over, too."""
    pools: int = 0
    """The same of all chunks in flight."""
    activations: int = 0
    """What layers keep of all chunks in flight; with offloading, the share that stays."""
    activations_at_loss: int | None = None
    """The same where the chunk before the loss keeps less than the others, or more; None: no less and no more."""
    staging: int = 0
    recomputed: int = 0
    chunk: int = 0
    """What the layers of one chunk keep of one micro-batch, whose backward ends with the embedding's."""
    activations_behind_backward: int | None = None
    """What they hold when the backward of one micro-batch is over, deferred weight gradients included; None: all but `chunk`."""
    flushed: bool = True
    """Whether no micro-batch is in flight when gradients are reduced and parameters updated."""

    @property
    def fullest(self) -> StageMemory:
        """The moment at which most is held; of equals the first."""
        totals = self._totals
        moment = max(totals, key=lambda each: totals[each])
        beside: dict[str, Any] = self._beside_states(moment)
        return replace(self.states, moment=moment, totals=totals, **beside)

    @property
    def peak_bytes(self) -> int:
        """What is held then: `fullest.total`, in less time."""
        return max(self._totals.values())

    @property
    def _totals(self) -> dict[Moment, int]:
        states = self.states.total
        return {moment: states + sum(self._beside_states(moment).values()) for moment in self.moments}

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Those that the stage has: only the last one has logits, only the first one an embedding."""
        missing = {"loss", "head_backward"} if self.logits == 0 else set()
        missing |= {"embedding_backward"} if self.embedding_gradient == 0 else set()
        missing |= {"optimizer_made"} if self.optimizer_made == 0 else set()
        return tuple(moment for moment in MOMENTS if moment not in missing)

    @property
    def beside_states(self) -> dict[str, dict[str, int]]:
        """What is held beside what is always there, by moment and kind."""
        return {moment: self._beside_states(moment) for moment in self.moments}

    def at(self, moment: Moment) -> StageMemory:
        """What is held at one moment."""
        beside: dict[str, Any] = self._beside_states(moment)
        return replace(self.states, moment=moment, **beside)

    @property
    def _at_loss(self) -> dict[str, int]:
        """Beside what the head reads."""
        computed = {"logits": self.logits, "in_hand": self.loss_in_hand} if self.loss_in_hand else {"logits": self.logits}
        if not self.logits_kept:
            return computed
        behind = {"logits": self.logits_kept, "in_hand": self.embedding_gradient + self.remembered}
        return max(computed, behind, key=lambda each: sum(each.values()))

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
            others = {"activations": self._activations_of_others + self.pool}
            return running | others | {"in_hand": self.embedding_gradient + self.remembered}
        return running | {"head": self.head // 2} if moment == "forward" else running

    def _between_batches(self, moment: Moment) -> dict[str, int]:
        """In reductions and updates."""
        left = {} if self.flushed else self._running | {"activations": self._activations_of_others}
        if self.pools:  # there is no plan beside graphs without flushes
            left = {"activations": self.pools}
        if moment == "reduction":
            return left | {"in_hand": self.reduced + self.remembered}
        return left | {"update_copies": self.update_copies, "in_hand": self.update_in_hand + self.remembered}

    @property
    def _running(self) -> dict[str, int]:
        """What is held for all micro-batches in flight, or to pass them on."""
        return {
            "activations": self.activations,
            "staging": self.staging,
            "embedding": self.embedding,
            "messages": self.messages,
        }

    @property
    def _activations_of_others(self) -> int:
        """When the backward of one micro-batch is over."""
        rest = self.activations - self.chunk if self.activations_behind_backward is None else self.activations_behind_backward
        return max(0, rest)
