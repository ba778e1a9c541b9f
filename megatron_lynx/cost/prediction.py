"""What multi-token prediction adds to the last stage: layers behind the last one, each with a loss of its own, none planned.

    tokens, one further ─> embedding ─> norm ─┐
                                              ├─> projection (2h to h) ─> a layer like the last one ─> norm ─> head and loss
    what the layer before put out ────> norm ─┘

seconds      those of a layer, an embedding and a head in the profile, of three of its norms, and of the projection, by its FLOPs
             beside those of the attention's row-parallel linear; its collectives are exposed
kept         of the micro-batch whose loss is next: all that the layer keeps, and six blocks as large as its input: what the
             embedding made, both normed ones side by side, what the layer and its norm put out; once more what was there before,
             because Megatron puts all results behind each other for the head. Of each loss what its backward reads
parameters   of the layer, the projection, three norms; the embeddings, where the first stage is another: beside the head, whose
             weight is allocated there even where it is tied

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
"""Of each layer that predicts: of the embedding, of what comes in, and of what goes out."""


def projection_weights(model: Model) -> int:
    """Weights of one projection over all tensor-parallel ranks."""
    return 2 * model.hidden**2


def last_end_of(profile: Profile, message_bytes: int, pieces: int = 1) -> BlockProfile:
    """The last stage's end: the head, once more behind every layer that predicts. `message_bytes`, `pieces`: as of the head."""
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
    """Forward and backward of one layer that predicts, without its head."""
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
    """Forward and backward of the projection: its input is twice as wide as a message, and its result is gathered."""
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
    """What all layers that predict keep of one micro-batch, without losses."""
    times = shape.model.mtp
    if not times:
        return 0
    layer = kept_bytes(shape, "none", shape.model.sections(shape.model.layers))
    return times * (layer + 5 * shape.input_bytes) + shape.input_bytes


def losses_bytes(shape: LayerShape) -> int:
    """What the losses of all layers that predict keep beside the usual one's."""
    return shape.model.mtp * loss_kept_bytes(shape)
