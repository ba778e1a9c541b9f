"""Finds saved tensors: those in call arguments, and those of the autograd nodes that a call created.

Default saved-tensor hooks lose the identity of parameters (rule R11). So calls that own parameters run without them, and hooks
are registered afterwards on single saved tensors of the nodes between outputs and arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lynx.nest import all_in


def tensors_in(value: Any) -> list[Tensor]:
    return [value] if type(value) is Tensor else all_in(Tensor, value)


def is_parameter(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor and isinstance(tensor, torch.nn.Parameter)


def detached(tensor: Tensor) -> Tensor:
    """Return an alias without graph and with the same `requires_grad`. Parameters are returned as they are."""
    if is_parameter(tensor):
        return tensor
    alias = tensor.detach()
    return alias.requires_grad_() if tensor.requires_grad else alias


def storage_of(tensor: Tensor) -> int:
    """Return an id, equal for tensors that share memory while one is alive; for empty tensors, for views of one another."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata


def memory_of(operands: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors with memory: FP8 wrappers have several (rowwise and columnwise bytes, scales), grouped GEMMs lists. Some
    wrappers report the storage of their bytes, but not of their scales."""
    for operand in operands:
        if isinstance(operand, list | tuple):
            yield from memory_of(operand)
        elif isinstance(operand, Tensor) and not is_wrapper(operand):
            yield operand
        else:
            yield from parts_of(operand).values()


def is_wrapper(tensor: Any) -> bool:
    """Return whether it is Transformer Engine's wrapper around the bytes and scales of a quantized matrix."""
    return type(tensor) is not Tensor and hasattr(tensor, "get_metadata")


def parts_of(wrapper: Any) -> dict[str, Tensor]:
    return {name: part for name, part in wrapper.get_metadata().items() if isinstance(part, Tensor)}


def without_parts(wrapper: Any) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that makes a wrapper like this one from other parts."""
    metadata = {name: part for name, part in wrapper.get_metadata().items() if not isinstance(part, Tensor)}
    if isinstance(wrapper, Tensor):
        metadata |= {"shape": wrapper.shape, "dtype": wrapper.dtype}
    kind = type(wrapper)  # the function must not hold the wrapper
    return lambda parts: kind(**parts, **metadata)


class View(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def in_(self, tensor: Tensor) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), self.offset, self.size, self.stride)


def tensor_of(held: Any) -> Tensor:
    """Return the tensor for which autograd holds this: itself, or what its stand-in makes."""
    return held if isinstance(held, Tensor) else held.tensor()


class Packing:
    """Default saved-tensor hooks that can be switched on and off while they are the innermost ones."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, tensor_of)
        self._on = False

    def turn(self, on: bool) -> None:
        if on is not self._on:
            self._on = on
            if on:
                self._hooks.__enter__()
            else:
                self._hooks.__exit__()


def without_default_hooks() -> AbstractContextManager[None]:
    """Switch off all default saved-tensor hooks inside: a half that is recomputed while another one's record waits would save its
    tensors as those of the other."""
    return nullcontext() if torch._C._autograd._top_saved_tensors_default_hooks(True) is None else _default_hooks_off()


@contextmanager
def _default_hooks_off() -> Iterator[None]:
    autograd, hooks = torch._C._autograd, []  # innermost first
    while (innermost := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(innermost)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


class Edge(NamedTuple):
    before: int | None
    """Index of the node that leads to it, among the walked ones; None for nodes of outputs."""
    at: int


def edges_between(outputs: Any, arguments: Any) -> list[tuple[Any, Edge]]:
    """Return the nodes from `outputs` back to `arguments`, in an order that depends on the code that ran only, each with the edge
    that reaches it, without gradient accumulators."""
    seen = {tensor.grad_fn for tensor in tensors_in(arguments)}
    waiting = [(tensor.grad_fn, Edge(None, at)) for at, tensor in enumerate(tensors_in(outputs))]
    edges: list[tuple[Any, Edge]] = []
    while waiting:
        node, edge = waiting.pop()
        if node is None or node in seen or type(node) is _ACCUMULATE:
            continue
        seen.add(node)
        place = len(edges)
        edges.append((node, edge))
        behind = [(before, Edge(place, at)) for at, (before, _) in enumerate(node.next_functions)]
        waiting.extend(reversed(behind))
    return edges


def nodes_at(edges: Sequence[Edge], kinds: Sequence[type], outputs: Any, arguments: Sequence[Tensor]) -> list[Any] | None:
    """Return the nodes that these edges reach; None if one is of another kind or lies before the call."""
    returned = tensors_in(outputs)
    nodes: list[Any] = []
    for (before, at), kind in zip(edges, kinds):  # noqa: B905 (as many of both; this runs for every site of every call)
        if before is None:
            node: Any = returned[at].grad_fn if at < len(returned) else None
        else:
            inputs = nodes[before].next_functions
            node = inputs[at][0] if at < len(inputs) else None
        if type(node) is not kind:
            return None
        nodes.append(node)
    for argument in arguments:
        if argument.grad_fn in nodes:
            return None
    return nodes


_ACCUMULATE = type(torch.empty(0, requires_grad=True).view(-1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


class Slot(NamedTuple):
    """A saved tensor's place in nodes of one kind."""

    raws: str
    """Attribute for raw saved tensors, on which hooks are registered."""
    tensors: str
    at: int | None

    def among(self, had: Any) -> Any:
        return had if self.at is None else had[self.at]


def saved_in(node: Any) -> Iterator[tuple[Slot, Tensor]]:
    """Yield the saved tensors of a node, which may be wrappers (`memory_of`)."""
    if hasattr(node, _OF_PYTHON[0]):  # a Python autograd.Function
        yield from ((Slot(*_OF_PYTHON, at), tensor) for at, tensor in enumerate(node.saved_tensors) if tensor is not None)
        return
    for name in _names_of(type(node)):  # type: ignore[arg-type]
        attributes = f"_raw_saved_{name}", f"_saved_{name}"
        saved = getattr(node, attributes[1])
        slots = enumerate(saved) if isinstance(saved, (tuple, list)) else ((None, saved),)
        yield from ((Slot(*attributes, at), tensor) for at, tensor in slots if isinstance(tensor, Tensor))


_OF_PYTHON = "_raw_saved_tensors", "saved_tensors"


@cache
def _names_of(kind: type) -> tuple[str, ...]:
    prefix = "_raw_saved_"
    return tuple(name.removeprefix(prefix) for name in dir(kind) if name.startswith(prefix))
