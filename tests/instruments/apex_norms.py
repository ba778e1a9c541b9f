"""The compiled parts of Apex's LayerNorms, in torch, for a checkout of Apex that was not built.

    megatron.core FusedLayerNorm ──> apex (real files, on the import path) ──> fused_layer_norm_cuda, fast_layer_norm
                                                                               stood in for

Apex is in no registry. Statistics are fp32, one per row; a memory-efficient norm saves its output, and gets its input back
from that by undoing weight and bias.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType

import torch

from tests.instruments.replacing import replace_entry
from tests.instruments.transformer_engine.normalization import layernorm_bwd, layernorm_fwd

Norm = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def stand_in_for_apex_norms() -> ExitStack:
    """Offer the extensions to an Apex that has none, until the returned stack is closed. Without Apex nothing is done."""
    undo = ExitStack()
    answers = {
        "fused_layer_norm_cuda": {"forward_affine": forward_affine, "backward_affine": backward_affine},
        "fast_layer_norm": {"ln_fwd": ln_fwd, "ln_bwd": ln_bwd},
    }
    for name, functions in answers.items():
        if importlib.util.find_spec("apex") is not None and name not in sys.modules and importlib.util.find_spec(name) is None:
            extension = ModuleType(name)
            vars(extension).update(functions)
            replace_entry(undo, sys.modules, name, extension)
    return undo


def ln_fwd(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, epsilon: float) -> Norm:
    """(normalised, mean, 1 / standard deviation) of rows."""
    return layernorm_fwd(x, gamma, beta, epsilon, None, None, x.dtype, 0, False)


def ln_bwd(
    dz: torch.Tensor,
    x_or_z: torch.Tensor,
    mu: torch.Tensor | None,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    memory_efficient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
    """Gradients of input, weight and bias, and two workspaces that nobody looks at."""
    if memory_efficient and beta is not None:
        rows = (x_or_z.float() - beta.float()) / gamma.float()  # normalised: its mean is 0, its deviation 1
        dx, dgamma, dbeta = layernorm_bwd(dz, rows, torch.zeros_like(rsigma), torch.ones_like(rsigma), gamma, 0, False)
        dx = (dx * rsigma.view(*dx.shape[:-1], 1)).to(x_or_z.dtype)
    else:
        assert mu is not None, "a norm that is not memory-efficient saves its mean"
        dx, dgamma, dbeta = layernorm_bwd(dz, x_or_z, mu, rsigma, gamma, 0, False)
    return dx, dgamma, dbeta, None, None


def forward_affine(
    input: torch.Tensor, normalized_shape: int | Sequence[int], weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> Norm:
    """As `ln_fwd`: Megatron normalises the last dimension alone."""
    return ln_fwd(input, weight, bias, eps)


def backward_affine(
    grad_output: torch.Tensor,
    mean: torch.Tensor | None,
    invvar: torch.Tensor,
    input_or_output: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    memory_efficient: bool = False,
) -> Norm:
    """Gradients of input, weight and bias."""
    return ln_bwd(grad_output, input_or_output, mean, invvar, weight, bias, memory_efficient)[:3]
