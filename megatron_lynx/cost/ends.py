"""What the ends of the model hold: the embedding on the first stage, the head and the loss on the last.

    logits, each in fp32 and in the model's type (bf16: 4 + 2 bytes)

    output projection   2                    the projection's result
    loss                2 + 4                `vocab_parallel_cross_entropy` makes an fp32 copy, and works in place on it
    forward is over         4                it becomes the softmax, which is kept
    loss's backward         4 + 2            the gradient, made in place, is cast to the model's type
    projection's backward       2            and its own gradients

In fp32 there is no copy: 4 bytes all the while.

Fused losses, at most    native   4 + 4 + 2    in its backward the compiler copies the softmax, to change it in place; in fp32 the
                                               gradient is 2 first, then 4. Uncompiled, as on CPU ranks, 4 + 2 from 16 bits
                         te       2 + 2        no fp32 copy; what becomes the gradient is the logits' own block, or, as in release
                                               2.20, a copy of it

In pieces (`runtime.loss_in_pieces`) logits are one piece's, whichever moment it is, and beside them in backward are the gradient
of all rows, the weight's sum and, with sequence parallelism, the rows that were gathered.

Counted with the real loss, compiled by inductor and not (`tests/cost/test_moments.py`); `te` read in `cross_entropy_forward`.
"""

from __future__ import annotations

from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape

NATIVE_GRADIENT_BYTES = 2
"""Megatron's own fused loss makes its gradient in bf16, whatever the logits are."""

LOG_PROBABILITIES_BYTES = 20
"""Of one logit, in fp32: the model's output, the same over the temperature, the softmax of log-probabilities, a copy for the
entropy, and its softmax (slime's `get_responses`, `calculate_log_probs_and_entropy`; verl's `vocab_parallel_entropy`)."""


def embedding_gradient_bytes(shape: LayerShape) -> int:
    """The gradient of the word embeddings, a block as large as they are, before it is added to Megatron's buffer."""
    return shape.model.vocab * shape.model.hidden // shape.parallel.tensor * shape.added_gradient_bytes


def logits_at_loss_bytes(shape: LayerShape, pieces: int = 1) -> int:
    """All copies of the logits while the loss is computed, or its backward begins."""
    return _logits(shape) // pieces * _loss_bytes(shape)


def _loss_bytes(shape: LayerShape) -> int:
    """Of one logit; see above."""
    element, kind = shape.model.element_bytes, shape.model.cross_entropy
    halved = element < FP32_BYTES
    if kind == "te":
        return 2 * element
    if kind == "native" and (shape.device == "cuda" or not halved):
        return 2 * FP32_BYTES + NATIVE_GRADIENT_BYTES
    return FP32_BYTES + (element if halved else 0)


def loss_kept_bytes(shape: LayerShape) -> int:
    """What a loss keeps of its logits from its forward to its backward."""
    return _logits(shape) * (shape.model.element_bytes if shape.model.cross_entropy == "te" else FP32_BYTES)


def log_probabilities_bytes(shape: LayerShape) -> int:
    """Copies of the logits where reinforcement learning asks for log-probabilities and entropy, of all tokens."""
    return _logits(shape) * LOG_PROBABILITIES_BYTES


def logits_gradient_bytes(shape: LayerShape, pieces: int = 1) -> int:
    """The gradient that the output projection's backward is given."""
    return _logits(shape) // pieces * shape.model.element_bytes


def tied_gradients_bytes(shape: LayerShape) -> int:
    """The most at once where one weight is both ends: the embedding's gradient beside what the head left, or their sum."""
    return max(embedding_gradient_bytes(shape), 2 * head_block_bytes(shape))


def loss_in_hand_bytes(shape: LayerShape, pieces: int, *, in_place: bool) -> int:
    """What lies beside the logits of a piece, from the second piece of a backward on: the gradient of all rows, those rows where
    they were gathered, and the sum of the weight's gradient. `in_place`: that is added up in Megatron's buffer."""
    if pieces == 1:
        return 0
    return (2 if _scatters(shape) else 1) * shape.gathered_bytes + (0 if in_place else _weight_sum_bytes(shape))


def head_in_hand_bytes(shape: LayerShape, tied: bool, pieces: int = 1, *, in_place: bool = True) -> int:
    """What the output projection's backward makes: its input's gradient, with sequence parallelism on all rows and on its own,
    and its weight's, which is added to Megatron's buffer when the logits' is gone. `tied`: it waits for the embedding's."""
    if pieces > 1:
        return _pieces_in_hand_bytes(shape, tied, pieces, in_place=in_place)
    scattered = shape.input_bytes if _scatters(shape) else 0
    if keeps_head_block(shape):
        return shape.gathered_bytes + scattered
    added = 0 if tied else embedding_gradient_bytes(shape) - logits_gradient_bytes(shape)
    return shape.gathered_bytes + scattered + max(head_block_bytes(shape), added)


def _pieces_in_hand_bytes(shape: LayerShape, tied: bool, pieces: int, *, in_place: bool) -> int:
    """The same in pieces: while the backward of one runs, or when all are done and the gradient of all rows is scattered."""
    block = 0 if keeps_head_block(shape) and in_place else head_block_bytes(shape)
    running = loss_in_hand_bytes(shape, pieces, in_place=in_place) + shape.gathered_bytes // pieces + block
    added = 0 if tied or not block else embedding_gradient_bytes(shape) - logits_gradient_bytes(shape, pieces)
    scattered = shape.input_bytes if _scatters(shape) else 0
    return max(running, loss_in_hand_bytes(shape, pieces, in_place=True) + scattered + max(block, added))


def _scatters(shape: LayerShape) -> bool:
    return shape.parallel.sequence_parallel and shape.parallel.tensor > 1


def _weight_sum_bytes(shape: LayerShape) -> int:
    """The sum of the weight's gradient over pieces, in fp32."""
    return FP32_BYTES * shape.model.vocab * shape.model.hidden // shape.parallel.tensor


def head_block_bytes(shape: LayerShape) -> int:
    """The gradient of the output projection's weight, or the block in place of it (`cost.in_hand`)."""
    return shape.model.vocab * shape.model.hidden // shape.parallel.tensor * shape.model.element_bytes


def keeps_head_block(shape: LayerShape) -> bool:
    """Whether that block is Transformer Engine's, which keeps it for the next time."""
    return shape.model.uses_te and shape.device == "cuda"


def _logits(shape: LayerShape) -> int:
    return shape.tokens * shape.model.vocab // shape.parallel.tensor
