"""Reading what autograd saved: tensors in call arguments, and the saved tensors of the nodes a call created.

    arguments ──grad_fn──┐ boundary                       outputs ──grad_fn──┐
                         ▼                                                   ▼
                    [ earlier graph ]  <──next_functions──  [ nodes of this call: saved input, weight, ... ]

Default saved-tensor hooks lose the identity of parameters (rule R11). So calls that own parameters run without them, and
hooks are registered afterwards on single saved tensors of the nodes found here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.nest import all_in


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a nest of tuples, lists and dicts, in order."""
    return all_in(Tensor, value)


def detached(tensor: Tensor) -> Tensor:
    """The same data without the graph behind it; asks for a gradient where the original did. Parameters stay themselves."""
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def storage_of(tensor: Tensor) -> int:
    """A number that is equal for tensors that share memory, while one of them is alive."""
    return tensor.untyped_storage().data_ptr()


def has_memory(tensor: Tensor) -> bool:
    """Whether it is more than a wrapper around other tensors."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return True
    try:
        storage_of(tensor)
    except RuntimeError:
        return False
    return True


@contextmanager
def suspended(hooks: torch.autograd.graph.saved_tensors_hooks) -> Iterator[None]:
    """Calls inside save tensors as if these hooks, the innermost ones, were not there."""
    hooks.__exit__()
    try:
        yield
    finally:
        hooks.__enter__()


def saved_between(outputs: Any, arguments: Any) -> Iterator[tuple[Any, Tensor]]:
    """Saved tensors of the nodes that lead from `arguments` to `outputs`: (the raw slot to register hooks on, the tensor).

    Not those without memory of their own: a wrapper around the bytes of a weight in FP8.
    """
    for node in nodes_between(outputs, arguments):
        yield from (pair for pair in _saved_of(node) if has_memory(pair[1]))


def nodes_between(outputs: Any, arguments: Any) -> Iterator[Any]:
    """The nodes of autograd that lead from `arguments` to `outputs`.

    The order depends on the code that ran and on nothing else, so that a recorded call and its replay agree on it.
    """
    boundary = [tensor.grad_fn for tensor in tensors_in(arguments) if tensor.grad_fn is not None]
    seen = set(boundary)
    waiting = [tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(behind for behind, _ in reversed(node.next_functions) if behind is not None)


def _saved_of(node: Any) -> Iterable[tuple[Any, Tensor]]:
    if hasattr(node, "_raw_saved_tensors"):  # a Python autograd.Function
        yield from (pair for pair in zip(node._raw_saved_tensors, node.saved_tensors, strict=True) if pair[1] is not None)
        return
    for name in _slots_of(type(node)):  # type: ignore[arg-type]
        raw, tensor = getattr(node, f"_raw_saved_{name}"), getattr(node, f"_saved_{name}")
        slots, tensors = (raw, tensor) if isinstance(raw, (tuple, list)) else ((raw,), (tensor,))
        yield from (pair for pair in zip(slots, tensors, strict=True) if isinstance(pair[1], Tensor))


@cache
def _slots_of(kind: type) -> tuple[str, ...]:
    """The names by which a node of autograd's own knows its saved tensors. They are the same for all nodes of a kind, and slow to
    list."""
    prefix = "_raw_saved_"
    return tuple(name.removeprefix(prefix) for name in dir(kind) if name.startswith(prefix))
