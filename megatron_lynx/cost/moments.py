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

Transients of a layer's backward are gradients passed between operators. Each operator allocates its inputs' gradients while its
output's gradient and its saved tensors are live, then frees both (`kinds.saved` lists the operators):

    gradient of       gathered                    of the             of the          scattered     of the
    the residual ──>  (sequence parallelism) ──>  GEMM's input  ──>  inputs of  ──>  ...      ──>  norm's input ──> + residual
        A             G                           F, Q               that: 2F, QKV   G, A          A
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from megatron_lynx.anatomy import HALVES, MLP, Half, Section
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.kinds.experts.planning import gathered_tokens
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.units import format_bytes

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
    def largest_part(self) -> str:
        name, size_bytes = max(self.kinds.items(), key=lambda kind: kind[1])
        return f"{name} {format_bytes(size_bytes)}"

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


@lru_cache(maxsize=1024)
def layer_in_hand_bytes(shape: LayerShape) -> int:
    """Return the peak transients of a layer that is whole when its backward begins: freed tensors of its MLP half make room."""
    kinds = {tuple(shape.model.halves.values())}
    if shape.model.opaque:
        opaque = (
            kind
            for kind in shape.model.kinds_of(range(1, shape.model.layers + 1))
            if any(section.in_some_layers and not section.exchanges for section in kind)
        )
        kinds |= {tuple(section for section in kind if not section.exchanges) for kind in opaque}
    return max(transient_bytes(shape, *kind) for kind in kinds)


@lru_cache(maxsize=1024)
def half_in_hand_bytes(shape: LayerShape) -> int:
    """Return the maximum transients of a half recomputed right before its backward: no earlier half has freed memory."""
    return max(transient_bytes(shape, section) for section in walked(shape.model))


@lru_cache(maxsize=1024)
def fullest_half_bytes(shape: LayerShape) -> int:
    """Return a lower bound on what any layer holds besides its input while its fullest half, of experts none, runs backward."""
    peak_bytes, halves = half_in_hand_bytes(shape), shape.model.halves.values()
    asked = [section for section in halves if section.half != MLP.half or shape.model.experts is None]
    saved = ((section, sum(_freed(shape, section).values())) for section in asked)
    return max(0, *(size - (peak_bytes - transient_bytes(shape, section)) for section, size in saved))


def less_in_hand_bytes(job: Job) -> Mapping[Half, int]:
    """Return by half how much lower its transients are than `half_in_hand_bytes`, which is charged everywhere; of experts, than
    the layer's. Empty if the budget bounds layers only."""
    if job.budget.activation_mib is not None:
        return {}
    shape = LayerShape.of(job)
    peak_bytes, layer = half_in_hand_bytes(shape), layer_in_hand_bytes(shape)
    less = {
        half: peak_bytes - max(transient_bytes(shape, section) for section in walked(shape.model) if section.half == half)
        for half in HALVES
    }
    return less if shape.model.experts is None else {**less, MLP.half: peak_bytes - layer}


def walked(model: Model) -> Iterator[Section]:
    return (section for section in model.every_section if not section.exchanges)


def kept_blocks_bytes(shape: LayerShape) -> int:
    """Return the dummy gradient blocks that Transformer Engine keeps for the layers' weights."""
    if not shape.keeps_gradient_blocks:
        return 0
    faces = map(planning_of, shape.model.halves.values())
    weights = {(linear.made, linear.taken) for face in faces for linear in face.linears(shape).values()}
    return sum(rows * columns for rows, columns in weights) * shape.model.element_bytes


def global_buffer_bytes(shape: LayerShape) -> int:
    """Return the size of Megatron's global memory buffer, which is never freed: gathered inputs of local layers, all tokens of
    dispatchers, and an unread summand of unfused attention's first GEMM."""
    tokens = 0
    if shape.model.moe_dispatcher == "allgather":
        tokens = gathered_tokens(shape) * shape.model.routed_hidden * shape.model.element_bytes
    if shape.model.uses_te:
        return tokens
    gathered = shape.gathered_input_bytes if shape.parallel.sequence_parallel else 0
    scores = shape.scores * shape.model.element_bytes if shape.model.attention == "unfused" else 0
    return max(gathered, scores, tokens)


def transient_bytes(shape: LayerShape, *sections: Section) -> int:
    """Return the peak transients of these sections, in forward order, which are all live when their backward begins."""
    freed = {name: size for section in sections for name, size in _freed(shape, section).items()}
    level = peak_bytes = shape.input_bytes  # gradient of the residual
    for section in reversed(sections):
        for step in planning_of(section).backward(shape):
            level += step.made
            peak_bytes = max(peak_bytes, level)
            level -= step.let_go + freed.get(step.item, 0)
    return peak_bytes


def _freed(shape: LayerShape, section: Section) -> dict[str, int]:
    """Return the bytes freed after each item's backward: a tensor is freed by its first reader in forward order."""
    freed = dict.fromkeys(section.names, 0)
    for tensor in planning_of(section).tensors(shape):
        if tensor.saved_by:
            freed[min(tensor.saved_by, key=section.names.index)] += tensor.bytes
    return freed
