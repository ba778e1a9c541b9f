"""Types of tensors on a CPU by the names of CUDA's, which gradient clipping and Megatron's optimizers require."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from tests.instruments.replacing import replace


def stand_in_for_tensor_types() -> ExitStack:
    undo = ExitStack()
    replace(undo, torch.Tensor, "type", with_cuda_type_name(torch.Tensor.type))
    return undo


def with_cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return f"torch.cuda.{original(tensor).split('.')[-1]}"  # a subclass of Tensor comes here twice
        return original(tensor, dtype, non_blocking, **kwargs)

    return type_
