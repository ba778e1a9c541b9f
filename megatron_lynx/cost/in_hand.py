"""What the backward of a layer has in hand beside what the layer keeps: gradients on their way from operator to operator.

    gradient of       gathered                    of what the        of what it      scattered     of the
    the residual ──>  (sequence parallelism) ──>  GEMM was given ──> was made of ──> ...       ──> norm's input ──> + residual
        A             G                           F, Q               2F, QKV         G, A          A

    MLP          dropout, linear_fc2, activation, linear_fc1, norm
    attention    dropout, linear_proj, core attention, rotary, linear_qkv, norm

Each operator allocates the gradients of its arguments while the one it was given and what it saved are still there, then lets go
of both. That is walked through here, operator by operator; most is in hand where the balance is highest.

Each kind says which operators its halves have (`kinds.backward`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from megatron_lynx.anatomy import HALVES, MLP, Half, Section
from megatron_lynx.config.job import Job
from megatron_lynx.kinds.experts.saved import gathered_tokens
from megatron_lynx.kinds.face import Step
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.shape import LayerShape


@lru_cache(maxsize=1024)
def layer_in_hand_bytes(shape: LayerShape) -> int:
    """The most at once in a layer all of which is there when its backward begins: what the MLP half lets go of makes room.

    Remembered, as the next one is: a search asks for every stage of every pipeline that the same layers are put into.
    """
    kinds = {tuple(shape.model.halves.values()), *_opaque_kinds(shape)}
    return max(_in_layer(shape, kind) for kind in kinds)


def _opaque_kinds(shape: LayerShape) -> Iterator[tuple[Section, ...]]:
    """Of layers that have something that nobody looks into, without experts."""
    kinds = shape.model.kinds_of(range(1, shape.model.layers + 1)) if shape.model.opaque else ()
    return (tuple(each for each in kind if not each.exchanges) for kind in kinds if any(each.opaque for each in kind))


def _in_layer(shape: LayerShape, sections: Sequence[Section]) -> int:
    freed = {name: size for section in sections for name, size in _freed(shape, section).items()}
    return _most(shape, [step for section in reversed(sections) for step in planning_of(section).backward(shape)], freed)


@lru_cache(maxsize=1024)
def half_in_hand_bytes(shape: LayerShape) -> int:
    """The same of each half by itself: where a half is made again right before its backward, nothing was let go of before."""
    return max(alone_in_hand_bytes(shape, section) for section in _walked(shape))


@lru_cache(maxsize=1024)
def fullest_half_bytes(shape: LayerShape) -> int:
    """What any layer holds at least beside its input while one of its halves runs backward: all that this half saves, less what
    it has less in hand than `half_in_hand_bytes`. Of the half of which that is most; of experts it is not asked."""
    most, halves = half_in_hand_bytes(shape), shape.model.halves.values()
    asked = [section for section in halves if section.half != MLP.half or shape.model.experts is None]
    saved = ((section, sum(_freed(shape, section).values())) for section in asked)
    return max(0, *(size - (most - alone_in_hand_bytes(shape, section)) for section, size in saved))


def less_in_hand_bytes(job: Job) -> Mapping[Half, int]:
    """How much less is in hand while a half runs backward than `half_in_hand_bytes`, which is counted beside all layers.

    Beside experts as much counts as beside a layer under stock's settings. A bound on what layers hold themselves is not about
    what is in hand.
    """
    if job.budget.activation_mib is not None:
        return {}
    shape = LayerShape.of(job)
    most, layer = half_in_hand_bytes(shape), layer_in_hand_bytes(shape)
    less = {half: most - max(alone_in_hand_bytes(shape, each) for each in _walked(shape) if each.half == half) for half in HALVES}
    return less if shape.model.experts is None else {**less, MLP.half: most - layer}


def _walked(shape: LayerShape) -> Iterator[Section]:
    """All that fills halves, but experts."""
    return (section for section in shape.model.every_section if section.opaque or not section.in_some_layers)


def kept_blocks_bytes(shape: LayerShape) -> int:
    """The blocks that Transformer Engine keeps in place of the gradients of a layer's weights."""
    if not shape.model.uses_te or shape.device == "cpu":
        return 0
    faces = map(planning_of, shape.model.halves.values())
    weights = {(linear.made, linear.taken) for face in faces for linear in face.linears(shape).values()}
    return sum(rows * columns for rows, columns in weights) * shape.model.element_bytes


def global_buffer_bytes(shape: LayerShape) -> int:
    """Megatron's global buffer "mpu", which stays once it is there.

    Local layers gather their inputs into it, and dispatchers all tokens. The first GEMM of unfused attention is given it as a
    summand that it does not read.
    """
    tokens = 0
    if shape.model.moe_dispatcher == "allgather":
        tokens = gathered_tokens(shape) * shape.model.hidden * shape.model.element_bytes
    if shape.model.uses_te:
        return tokens
    gathered = shape.gathered_input_bytes if shape.parallel.sequence_parallel and shape.parallel.tensor > 1 else 0
    scores = shape.scores * shape.model.element_bytes if shape.model.attention == "unfused" else 0
    return max(gathered, scores, tokens)


def alone_in_hand_bytes(shape: LayerShape, section: Section) -> int:
    """The most at once in one half by itself."""
    return _most(shape, planning_of(section).backward(shape), _freed(shape, section))


def _most(shape: LayerShape, steps: Iterable[Step], freed: dict[str, int]) -> int:
    level = most = shape.input_bytes  # the residual's gradient
    for step in steps:
        level += step.made
        most = max(most, level)
        level -= step.let_go + freed.get(step.item, 0)
    return most


def _freed(shape: LayerShape, section: Section) -> dict[str, int]:
    """Bytes that are let go of after each item's backward: those of which it is the last reader, the first one in forward."""
    freed = dict.fromkeys(section.names, 0)
    for tensor in planning_of(section).tensors(shape):
        if tensor.saved_by:
            freed[min(tensor.saved_by, key=section.names.index)] += tensor.bytes
    return freed
