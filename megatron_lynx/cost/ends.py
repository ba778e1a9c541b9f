"""Memory and seconds of the model's ends: the embedding on the first stage, the head and the loss on the last.

    bytes per logit, in fp32 + in the model's type (bf16); an fp32 model has no copy: 4 throughout

    output projection   2                    its output
    loss                2 + 4                `vocab_parallel_cross_entropy` makes an fp32 copy and works in place on it
    after forward           4                the copy is now the softmax, which is saved
    loss backward           4 + 2            the gradient, computed in place, is cast to the model's type
    projection backward         2            and its own gradients

Fused losses, at most    native   4 + 4 + 2    in backward the compiler copies the softmax to change it in place; in fp32 the
                                               gradient is 2 first, then 4. Eager, as on CPU ranks, 4 + 2 from 16 bits
                         te       2 + 2        no fp32 copy; the gradient is written into the logits, or, as in release 2.20,
                                               into a copy

With the head in pieces (`apply.hooks.head_in_pieces`) the logits are one piece's. Backward adds the gradient of all rows, the
sum of the weight's gradient and, with sequence parallelism, the gathered rows.

Multi-token prediction (MTP) adds layers on the last stage, each with a loss, never recomputed by a plan:

    tokens shifted by one ──> embedding ─> norm ─┐
                                                 ├─> projection (2h to h) ─> a layer like the last one ─> norm ─> head and loss
    output of the previous layer ─────────> norm ┘

    saved        by the layer, and six blocks as large as its input: embedding output, both normed ones concatenated, outputs of
                 layer and norm; and a copy of the earlier outputs, since Megatron concatenates all for the head
    parameters   layer, projection, three norms; with pipelining a copy of the embeddings and the head, even if tied

Source: `MultiTokenPredictionLayer` and `GPTModel._postprocess` of megatron-core 0.16 to 0.19.
"""

from __future__ import annotations

from megatron_lynx.anatomy import Section
from megatron_lynx.config.model import Model
from megatron_lynx.cost.communication import embedding_of, head_of, window_lengths_s
from megatron_lynx.cost.recompute import kept_bytes
from megatron_lynx.profiler.profile import BlockProfile, Profile
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape

NATIVE_GRADIENT_BYTES = 2
"""Megatron's native fused loss makes its gradient in bf16 for any type of logits."""


def _words(shape: LayerShape) -> int:
    return shape.model.vocab * shape.model.hidden // shape.parallel.tensor


def embedding_gradient_bytes(shape: LayerShape) -> int:
    return _words(shape) * shape.added_gradient_bytes


def logits_at_loss_bytes(shape: LayerShape, pieces: int = 1) -> int:
    """Return all copies of the logits while the loss is computed or its backward begins."""
    if (loss := shape.model.log_probabilities) is not None:
        return round(_logits(shape) // pieces * loss.peak_bytes + _words(shape) * loss.weight_bytes)
    return _logits(shape) // pieces * _loss_bytes(shape)


def _loss_bytes(shape: LayerShape) -> int:
    element, kind = shape.model.element_bytes, shape.model.cross_entropy
    halved = element < FP32_BYTES
    if kind == "te":
        return 2 * element
    if kind == "native" and (shape.device == "cuda" or not halved):
        return 2 * FP32_BYTES + NATIVE_GRADIENT_BYTES
    return FP32_BYTES + (element if halved else 0)


def loss_kept_bytes(shape: LayerShape) -> int:
    if (loss := shape.model.log_probabilities) is not None:
        return round(_logits(shape) * loss.saved_bytes)
    return _logits(shape) * (shape.model.element_bytes if shape.model.cross_entropy == "te" else FP32_BYTES)


def logits_gradient_bytes(shape: LayerShape, pieces: int = 1) -> int:
    if (loss := shape.model.log_probabilities) is not None and not loss.saved_bytes:
        return 0
    return _logits(shape) // pieces * shape.model.element_bytes


def loss_in_hand_bytes(shape: LayerShape, pieces: int, *, in_place: bool) -> int:
    """Return the bytes live with a piece's logits from the second piece of a backward on. `in_place`: the weight's gradient is
    added to Megatron's buffer."""
    if pieces == 1:
        return 0
    return (2 if shape.parallel.sequence_parallel else 1) * shape.gathered_bytes + (0 if in_place else FP32_BYTES * _words(shape))


def head_in_hand_bytes(shape: LayerShape, tied: bool, pieces: int = 1, *, in_place: bool = True) -> int:
    """Return the transients of the output projection's backward. `tied`: its weight's gradient waits for the embedding's."""
    if pieces > 1:
        return _pieces_in_hand_bytes(shape, tied, pieces, in_place=in_place)
    scattered = shape.input_bytes if shape.parallel.sequence_parallel else 0
    if shape.keeps_gradient_blocks:
        return shape.gathered_bytes + scattered
    added = 0 if tied else embedding_gradient_bytes(shape) - logits_gradient_bytes(shape)
    return shape.gathered_bytes + scattered + max(head_block_bytes(shape), added)


def _pieces_in_hand_bytes(shape: LayerShape, tied: bool, pieces: int, *, in_place: bool) -> int:
    """Return the same for a head in pieces: during one piece's backward, or when the gradient of all rows is scattered."""
    block = 0 if shape.keeps_gradient_blocks and in_place else head_block_bytes(shape)
    running = loss_in_hand_bytes(shape, pieces, in_place=in_place) + shape.gathered_bytes // pieces + block
    added = 0 if tied or not block else embedding_gradient_bytes(shape) - logits_gradient_bytes(shape, pieces)
    scattered = shape.input_bytes if shape.parallel.sequence_parallel else 0
    return max(running, loss_in_hand_bytes(shape, pieces, in_place=True) + scattered + max(block, added))


def head_block_bytes(shape: LayerShape) -> int:
    """Return the gradient of the output projection's weight, or the block that replaces it (`kept_blocks_bytes`)."""
    return _words(shape) * shape.model.element_bytes if shape.model.adapters is None else 0


def _logits(shape: LayerShape) -> int:
    return shape.tokens * shape.model.vocab // shape.parallel.tensor


NORMS = 3


def projection_weights(model: Model) -> int:
    return 2 * model.hidden**2


NO_BLOCK = BlockProfile()


def ends_of(
    profile: Profile, message_bytes: int, *, first: bool, last: bool, pieces: int = 1
) -> tuple[BlockProfile, BlockProfile]:
    """Return the embedding if `first`, and the last stage's end if `last`; else a block without seconds."""
    return (
        embedding_of(profile, message_bytes) if first else NO_BLOCK,
        last_end_of(profile, message_bytes, pieces) if last else NO_BLOCK,
    )


def last_end_of(profile: Profile, message_bytes: int, pieces: int = 1) -> BlockProfile:
    """Return the last stage's end: the head, once more for every MTP layer, and these layers."""
    head, times = head_of(profile, message_bytes, pieces), profile.shape.mtp
    if not times:
        return head
    forward_s, backward_s = _predicting_s(profile, message_bytes)
    return head.model_copy(
        update={
            "forward_s": (1 + times) * head.forward_s + times * forward_s,
            "backward_s": (1 + times) * head.backward_s + times * backward_s,
        }
    )


def _predicting_s(profile: Profile, message_bytes: int) -> tuple[float, float]:
    sections = attention, _ = profile.shape.sections
    halves, embedding = [profile.of(section) for section in sections], embedding_of(profile, message_bytes)
    norm, projection_s = halves[0].items[attention.norm], _projection_s(profile, attention, message_bytes)
    windows = [
        sum(sum(window_lengths_s(profile, passing, section, message_bytes)) for section in sections) for passing in ("fwd", "bwd")
    ]
    forward_s = sum(half.forward_s for half in halves) + windows[0] + embedding.forward_s + NORMS * norm.forward_s
    backward_s = sum(half.backward_s for half in halves) + windows[1] + embedding.backward_s + NORMS * norm.backward_s
    return forward_s + projection_s[0], backward_s + projection_s[1]


def _projection_s(profile: Profile, attention: Section, message_bytes: int) -> tuple[float, float]:
    """Return forward and backward seconds of the projection: its input is two messages wide, its output is gathered."""
    shape, alike = profile.shape, profile.of(attention).items[attention.row_parallel]
    element = 4 if shape.dtype == "fp32" else 2
    flops = 4 * (message_bytes // element) * shape.hidden // shape.tensor
    times = flops / alike.flops if alike.flops else 2.0
    forward_s, backward_s = times * alike.forward_s, times * alike.backward_s
    if shape.tensor == 1:
        return forward_s, backward_s
    gather_s = profile.link_s("all_gather", message_bytes)
    if not shape.sequence_parallel:
        return forward_s + gather_s, backward_s + profile.link_s("all_reduce", 2 * message_bytes)
    wide_s = profile.link_s("all_gather", 2 * message_bytes)
    return forward_s + gather_s + wide_s, backward_s + gather_s + wide_s + profile.link_s("reduce_scatter", 2 * message_bytes)


def predicting_bytes(shape: LayerShape) -> int:
    times = shape.model.mtp
    if not times:
        return 0
    layer = kept_bytes(shape, shape.model.sections(shape.model.layers))
    return times * (layer + 5 * shape.input_bytes) + shape.input_bytes
