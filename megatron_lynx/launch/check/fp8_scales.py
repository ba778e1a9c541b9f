"""Scales and amax histories of FP8, which every pass changes. Transformer Engine makes them in a module's first forward.

Its modules' extra states, which checkpoints hold, say nothing of one that did not run yet: a pass behind the first one would
begin with the scales that that one left. And they are pickled, which newer releases refuse to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

TensorKey = tuple[int, str, str]


def in_fp8(module: Module) -> bool:
    """Whether it is one of Transformer Engine's, which may run in FP8."""
    return hasattr(module, "fp8_meta")


class Fp8Scales:
    """Those of some modules, as they were when this was made."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._modules = [module for module in modules if in_fp8(module)]
        self._before = {key: tensor.clone() for key, tensor in self._present()}

    @torch.no_grad()
    def restore(self) -> None:
        """Where the tensors lie: lists of the whole process refer to them. New ones as they begin."""
        for key, tensor in self._present():
            before = self._before.get(key)
            tensor.copy_(before if before is not None else torch.full_like(tensor, float(key[2] == "scale")))

    def _present(self) -> Iterator[tuple[TensorKey, Tensor]]:
        for number, module in enumerate(self._modules):
            meta: Any = module.fp8_meta
            for direction in ("scaling_fwd", "scaling_bwd"):
                for part in ("scale", "amax_history"):
                    tensor = getattr(meta.get(direction), part, None)
                    if isinstance(tensor, Tensor):
                        yield (number, direction, part), tensor
