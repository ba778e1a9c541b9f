"""Everything that Transformer Engine keeps of FP8 from step to step, of the modules and of the process. Nothing without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

QUANTIZATION = "transformer_engine.pytorch.quantization"


def reset_fp8() -> None:
    """Forget the modules of models that are gone: their amaxes are reduced with those of the present one else."""
    if QUANTIZATION in sys.modules:
        sys.modules[QUANTIZATION].FP8GlobalStateManager.reset()


def fp8_state(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    if QUANTIZATION not in sys.modules:
        return
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if getattr(module, "fp8_meta", None):
                yield from ((f"fp8 {number} {name}.{part}", tensor.detach().clone()) for part, tensor in _of_module(module))
    manager = sys.modules[QUANTIZATION].FP8GlobalStateManager
    state = getattr(manager, "quantization_state", manager)
    for buffer in ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer"):
        for index, tensors in enumerate(getattr(state, buffer).values()):
            yield from ((f"fp8 {buffer} {index}.{place}", tensor.clone()) for place, tensor in enumerate(tensors))
    yield "fp8 autocast", torch.tensor([bool(value) for value in manager.get_autocast_state()])
    yield "fp8 recompute buffer", torch.tensor(len(state.fp8_tensors_recompute_buffer))


def _of_module(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for direction in ("scaling_fwd", "scaling_bwd"):
        for part in ("scale", "amax_history"):
            if isinstance(tensor := getattr(module.fp8_meta.get(direction), part, None), torch.Tensor):
                yield f"{direction}.{part}", tensor
        for index, quantizer in enumerate(module.quantizers[direction]):
            yield f"{direction}.usages {index}", torch.tensor([quantizer.rowwise_usage, quantizer.columnwise_usage])
    own = ((name, each) for name, each in module.named_parameters(recurse=False) if hasattr(each, "get_metadata"))
    for name, weight in (*module._fp8_workspaces.items(), *own):
        yield from ((f"{name}.{part}", t) for part, t in weight.get_metadata().items() if isinstance(t, torch.Tensor))
