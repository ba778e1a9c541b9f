"""What a rank holds of its states, counted: parameters, gradients, and what the optimizer has made by now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from megatron_lynx.runtime.saved import memory_of


def states_held(models: Iterable[Module], optimizer: Any) -> dict[str, int]:
    """Bytes by kind, without kinds of which there are none. Memory that several tensors share counts once, and what an optimizer
    has on the host not at all."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    devices = {parameter.device.type for parameter in parameters}
    gradients = [gradient for parameter in parameters for gradient in (getattr(parameter, "main_grad", None), parameter.grad)]
    counted: set[int] = set()
    kinds: dict[str, Iterable[Tensor]] = {
        "parameters": parameters,
        "gradients": [gradient for gradient in gradients if gradient is not None],
        "optimizer": [tensor for tensor in _tensors_of(optimizer) if not devices or tensor.device.type in devices],
    }
    found = {kind: _bytes(tensors, counted) for kind, tensors in kinds.items()}
    return {kind: size for kind, size in found.items() if size}


def has_state(optimizer: Any) -> bool:
    """Whether an optimizer has made its state, in a step or from a checkpoint."""
    return any(_states_of(each) for each in _inner(optimizer))


def _bytes(tensors: Iterable[Tensor], counted: set[int]) -> int:
    size = 0
    for tensor in memory_of(tensors):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            size += storage.nbytes()
    return size


def _tensors_of(optimizer: Any) -> Iterator[Tensor]:
    """Main parameters and states, of Megatron's optimizers and of torch's."""
    for inner in _inner(optimizer):
        parameters = (parameter for group in getattr(inner, "param_groups", ()) for parameter in group["params"])
        states = (value for state in _states_of(inner).values() for value in state.values())
        yield from (each for each in (*parameters, *states) if isinstance(each, Tensor))


def _inner(optimizer: Any) -> Iterator[Any]:
    """Those of torch's that do the work: Megatron's wrap them, or chain others."""
    if hasattr(optimizer, "chained_optimizers"):
        for chained in optimizer.chained_optimizers:
            yield from _inner(chained)
    elif optimizer is not None:
        yield getattr(optimizer, "optimizer", None) or optimizer


def _states_of(inner: Any) -> Mapping[Any, Mapping[str, Any]]:
    return getattr(inner, "state", None) or {}
