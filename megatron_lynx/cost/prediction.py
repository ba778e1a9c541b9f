"""Multi-token prediction (MTP) on the last stage: extra layers, each with a loss, never recomputed by a plan.

    tokens shifted by one ──> embedding ─> norm ─┐
                                                 ├─> projection (2h to h) ─> a layer like the last one ─> norm ─> head and loss
    output of the previous layer ─────────> norm ┘

seconds      layer, embedding and head from the profile, three norms, and the projection, scaled by FLOPs from the attention's
             row-parallel linear, with exposed collectives
kept         for the next loss's micro-batch: all that the layer saves, and six blocks as large as its input: embedding output,
             both normed ones concatenated, outputs of layer and norm; and a copy of the earlier outputs, since Megatron
             concatenates all for the head. For each loss what its backward reads
parameters   layer, projection, three norms; with pipelining a copy of the embeddings, and the head, whose weight is allocated
             there even if tied

Source: `MultiTokenPredictionLayer` and `GPTModel._postprocess` of megatron-core 0.16 to 0.19.
"""

from __future__ import annotations

from megatron_lynx.anatomy import Section
from megatron_lynx.config.model import Model
from megatron_lynx.cost.communication import embedding_of, head_of, window_lengths_s
from megatron_lynx.cost.ends import loss_kept_bytes
from megatron_lynx.cost.layer import kept_bytes
from megatron_lynx.profiler.profile import BlockProfile, Profile
from megatron_lynx.profiler.shape import LayerShape

NORMS = 3
"""Norms of an MTP layer: of the embedding, its input, and its output."""


def projection_weights(model: Model) -> int:
    """Return the weights of one projection over all tensor-parallel ranks."""
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
    """Return forward and backward seconds of one MTP layer without its head."""
    shape = profile.shape
    attention, mlp = shape.halves.values()
    sections = (attention, mlp if shape.experts is None else shape.experts.section)
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
    """Return the bytes saved by all MTP layers of one micro-batch, without losses."""
    times = shape.model.mtp
    if not times:
        return 0
    layer = kept_bytes(shape, "none", shape.model.sections(shape.model.layers))
    return times * (layer + 5 * shape.input_bytes) + shape.input_bytes


def losses_bytes(shape: LayerShape) -> int:
    """Return the bytes saved by all MTP losses."""
    return shape.model.mtp * loss_kept_bytes(shape)
