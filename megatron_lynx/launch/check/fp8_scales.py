"""Every pass in FP8 changes scales and amax histories; here they are saved and put back.

Transformer Engine makes them in a module's first forward. The modules' extra states, which checkpoints hold, say nothing of a
module that has not run yet, so a second pass would begin with the scales of the first; and newer releases refuse to read them.
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
    """FP8 scales and amax histories of some modules, as they were when this was made."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._modules = [module for module in modules if in_fp8(module)]
        self._before = {key: tensor.clone() for key, tensor in self._present()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put values back into the same tensors, as lists of the whole process refer to them. New tensors get initial values."""
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
