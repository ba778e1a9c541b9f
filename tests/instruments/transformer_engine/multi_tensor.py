"""Functions of optimizers on lists of tensors: norms, scaling, Adam. Megatron uses them where Transformer Engine is installed.

`tensor_lists` is a list of roles, each a list with one tensor per parameter; what is written is written in place.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.instruments.transformer_engine.float8 import scale_of_amax

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
]

Lists = list[list[torch.Tensor]]


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float) -> None:
    """Write the first list, scaled, over the second; the flag tells that a number was not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        if not torch.isfinite(source).all():
            noop_flag.fill_(1)
        target.copy_(source.float() * scale)


def multi_tensor_scale_tensor(chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor) -> None:
    multi_tensor_scale(chunk_size, is_infinite, tensor_lists, float(scale))


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor_python: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of all, norm of each or nothing)"""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().view(1), norms if per_tensor_python else torch.empty(0)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, inv_scale: torch.Tensor, per_tensor_python: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of tensors that are still scaled by the loss scale."""
    unscaled = [[tensor.float() * inv_scale for tensor in tensor_lists[0]]]
    return multi_tensor_l2norm(chunk_size, noop_flag, unscaled, per_tensor_python)


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, max_fp8: float, force_pow_2_scales: bool, epsilon: float
) -> None:
    """Write scales, and what they are divided by again, for largest magnitudes. Lists: of magnitudes, of scales, of inverses."""
    for amax, scale, inverse in zip(*tensor_lists, strict=True):
        scale.copy_(scale_of_amax(amax, max_fp8, powers=force_pow_2_scales, epsilon=epsilon))
        inverse.copy_(scale.reciprocal())


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step. Lists: gradients, parameters, first and second moments, and fp32 masters of the parameters if there are any.

    `mode` 0 adds the weight decay to the gradient, 1 to the update (AdamW).
    """
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, first, second, *master in zip(*tensor_lists, strict=True):
        weights = (master or [parameter])[0]
        values, slope = weights.detach().float(), gradient.float()
        slope = slope + weight_decay * values if mode == 0 else slope
        mean = beta1 * first.float() + (1 - beta1) * slope
        square = beta2 * second.float() + (1 - beta2) * slope * slope
        update = (mean / correction1) / ((square / correction2).sqrt() + epsilon)
        values = values - lr * (update + weight_decay * values if mode == 1 else update)
        write([(first, mean), (second, square), (parameter, values), *((tensor, values) for tensor in master)])


@torch.no_grad()
def write(results: list[tuple[Any, torch.Tensor]]) -> None:
    for target, values in results:
        target.copy_(values)
