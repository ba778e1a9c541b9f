"""Peak transient memory of a layer's backward: gradients passed between operators.

    gradient of       gathered                    of the             of the          scattered     of the
    the residual ──>  (sequence parallelism) ──>  GEMM's input  ──>  inputs of  ──>  ...      ──>  norm's input ──> + residual
        A             G                           F, Q               that: 2F, QKV   G, A          A

Each operator allocates its inputs' gradients while its output's gradient and its saved tensors are live, then frees both
(`kinds.saved` lists the operators).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from megatron_lynx.anatomy import HALVES, MLP, Half, Section
from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.kinds.experts.planning import gathered_tokens
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.shape import LayerShape


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
