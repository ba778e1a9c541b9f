"""What a plan does not promise in every bit, and how near to stock it must be: the gradient of a head's weight that is summed up
in pieces, which is the embedding's, too, where both are one weight.

A difference is measured by the largest value of stock's gradient: single values of a sum in another order may be near 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.nn import Module, Parameter

from megatron_lynx.launch.check.outcome import gradient_of, named_parameters

IN_FP32 = 2.0**-16
"""Of sums in fp32 (24 bits), whose order differs."""
IN_16_BITS = 2.0**-7
"""Of sums that are rounded to 8 bits, once a micro-batch, in stock and under the plan."""
ADDED_IN_16_BITS = 2.0**-4
"""Where gradients are added up in 16 bits, each sum is rounded: of every micro-batch in stock, of every piece under the plan."""


def head_tolerances(chunks: Sequence[Module]) -> dict[str, float]:
    """Parameters of these chunks that are the head's weight, by their name in the whole model, and what they may differ by."""
    weights = {id(weight) for chunk in chunks for weight in _head_weights(chunk)}
    return {name: tolerance_of(chunks[0], parameter) for name, parameter in named_parameters(chunks) if id(parameter) in weights}


def tolerance_of(chunk: Module, weight: Parameter) -> float:
    """Of the largest value of a weight's gradient."""
    gradient, fused = gradient_of(weight), chunk.config.gradient_accumulation_fusion  # type: ignore[union-attr]
    if gradient is not None and gradient.element_size() < 4 and hasattr(weight, "main_grad"):
        return ADDED_IN_16_BITS
    return IN_FP32 if fused or weight.element_size() == 4 else IN_16_BITS


def _head_weights(chunk: Module) -> Iterator[Parameter]:
    tied = chunk.share_embeddings_and_output_weights
    if getattr(chunk, "post_process", False):
        yield chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight  # type: ignore[operator,union-attr,misc]
    if tied and getattr(chunk, "pre_process", False):
        yield chunk.embedding.word_embeddings.weight  # type: ignore[union-attr,misc]
