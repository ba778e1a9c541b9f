"""Megatron's kernels for the rotary parts of latent attention, in torch, where there is no triton for them.

    MLASelfAttention ──> fused_mla_yarn_rope_apply (Megatron's own autograd functions) ──> rotary_fwd_q_kernel[grid](...), ...
                                                                                           stood in for

    queries (t, a, d + r)     their last r columns are turned in place, forward and backward; even columns come before odd ones
    keys and values           out of place: of (t, a, d + v) and one rotary part (t, r) keys (t, a, d + r) and values (t, a, v)

t tokens of all sequences, a heads. As the kernels do, they write without autograd knowing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch

MODULE = "megatron.core.fusions.fused_mla_yarn_rope_apply"


def stand_in_for_latent_rotary() -> ExitStack:
    """Answer for the kernels until the returned stack is closed. To be in place before Megatron is imported."""
    undo = ExitStack()
    if MODULE not in sys.modules and importlib.util.find_spec("triton") is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
    return undo


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module, as others would, and puts the kernels in when it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == MODULE else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, original: Any) -> None:
        self._original = original

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._original.exec_module(module)
        for run in (rotary_fwd_q_kernel, rotary_bwd_q_kernel, rotary_fwd_kv_kernel, rotary_bwd_kv_kernel):
            setattr(module, run.__name__, _Kernel(run))


class _Kernel:
    """What is started with a grid in brackets. Here one call does the whole grid's work."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._run


def rotary_fwd_q_kernel(
    q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, size: int, rotary: int, heads: int, batch: int, *rest: Any
) -> None:
    part = q.data[..., size:]
    part.copy_(_turned(part, *_angles(cos, sin, len(q), rotary, batch)))


def rotary_bwd_q_kernel(
    gradient: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, size: int, rotary: int, heads: int, batch: int, *rest: Any
) -> None:
    part = gradient.data[..., size:]
    part.copy_(_turned_back(part, *_angles(cos, sin, len(gradient), rotary, batch)))


def rotary_fwd_kv_kernel(
    kv: torch.Tensor,
    rotary_key: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary: int,
    size: int,
    value_size: int,
    heads: int,
    batch: int,
    *rest: Any,
) -> None:
    key[..., :size] = kv.data[..., :size]
    value.copy_(kv.data[..., size:])
    turned = _turned(rotary_key.data.unsqueeze(1), *_angles(cos, sin, len(kv), rotary, batch))
    key[..., size:] = turned.expand(-1, heads, -1)


def rotary_bwd_kv_kernel(
    d_key: torch.Tensor,
    d_value: torch.Tensor,
    d_kv: torch.Tensor,
    d_rotary_key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotary: int,
    size: int,
    value_size: int,
    heads: int,
    batch: int,
    *rest: Any,
) -> None:
    d_kv[..., :size] = d_key[..., :size]
    d_kv[..., size:] = d_value
    together = d_key[..., size:].float().sum(1, keepdim=True).to(d_key.dtype)
    d_rotary_key.copy_(_turned_back(together, *_angles(cos, sin, len(d_key), rotary, batch)))


def _angles(cos: torch.Tensor, sin: torch.Tensor, tokens: int, rotary: int, batch: int | None) -> tuple[torch.Tensor, ...]:
    """Cosine and sine of each token, for its left and its right half: rows of the tables by position."""
    if batch is None:
        raise NotImplementedError("the fused rotary kernel of packed sequences")
    positions = torch.arange(tokens) // batch
    return tuple(half for table in (cos, sin) for half in table.reshape(-1, rotary)[positions].unsqueeze(1).chunk(2, -1))


def _turned(part: torch.Tensor, *angles: torch.Tensor) -> torch.Tensor:
    cos_left, cos_right, sin_left, sin_right = angles
    even, odd = part[..., 0::2], part[..., 1::2]
    return torch.cat((even * cos_left - odd * sin_left, odd * cos_right + even * sin_right), -1)


def _turned_back(part: torch.Tensor, *angles: torch.Tensor) -> torch.Tensor:
    cos_left, cos_right, sin_left, sin_right = angles
    left, right = part.chunk(2, -1)
    back = torch.empty_like(part)
    back[..., 0::2] = left * cos_left + right * sin_right
    back[..., 1::2] = right * cos_right - left * sin_left
    return back
