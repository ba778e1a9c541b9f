"""Model FLOPs per token and MFU. Recomputation does not count.

    causal    attention counted half, for the causal mask (Yuan et al., ATC '24): 6(L((2 + 2g/a)h² + 3hH) + hV) + 6Lhs
    whole     attention counted whole (Korthikanti et al.): 72Lh²(1 + s/(6h) + V/(12hL)) for a GPT

Compare published MFUs only within one convention.
"""

from __future__ import annotations

from typing import Literal

from megatron_lynx.config.model import Model
from megatron_lynx.cost.parameters import passed_weights
from megatron_lynx.cost.prediction import projection_weights

Convention = Literal["causal", "whole"]


def flops_per_token(model: Model, convention: Convention = "causal") -> int:
    """Return forward and backward FLOPs of the whole model: 6 per weight of a matrix, plus attention."""
    kinds, last = model.kinds_of(range(1, model.layers + 1)), model.sections(model.layers)
    matrices = sum(layers * passed_weights(model, kind) for kind, layers in kinds.items()) + model.hidden * model.vocab
    matrices += model.mtp * (passed_weights(model, last) + projection_weights(model) + model.hidden * model.vocab)
    kinds[last] += model.mtp
    attending = sum(layers for (first, _), layers in kinds.items() if not first.opaque)
    attention = (6 if convention == "causal" else 12) * attending * model.query_width * model.seq
    return 6 * matrices + round(attention * model.seen)


def mfu(model: Model, tokens_per_s: float, peak_flop_per_s: float, convention: Convention = "causal") -> float:
    """Return the model FLOPs utilisation; `tokens_per_s` and `peak_flop_per_s` of the same number of devices."""
    return tokens_per_s * flops_per_token(model, convention) / peak_flop_per_s
