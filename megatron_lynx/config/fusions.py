"""Megatron's fusions: code between the sites of a layer that runs as one kernel, compiled by `jit_fuser` or brought by others."""

from __future__ import annotations

from typing import Literal

Fusion = Literal["bias_dropout", "bias_activation", "rope", "masked_softmax"]
"""Bias, dropout and residual addition (`--no-bias-dropout-fusion` switches it off); bias and activation (`--no-bias-gelu-fusion`,
`--no-bias-swiglu-fusion`); rotary positions, with a kernel of Transformer Engine's (`--no-rope-fusion`); mask and softmax of
local layers' scores (`--no-masked-softmax-fusion`)."""
