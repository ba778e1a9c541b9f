"""What autograd saved for one call, and where it saved it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx.runtime.saved import Packing, detached, edges_between, memory_of, saved_in, storage_of


def names(outputs: Any, arguments: Any) -> list[str]:
    return [type(node).__name__ for node, _ in edges_between(outputs, arguments)]


def given(*size: int) -> Tensor:
    return torch.randn(size or (3,), requires_grad=True) * 1


def test_nodes_of_a_call_and_no_earlier_ones() -> None:
    before = given().sin()
    assert names(before.exp().tanh(), [before]) == ["TanhBackward0", "ExpBackward0"]
    assert names(before, [before]) == []


def test_a_node_that_two_paths_reach_comes_once() -> None:
    argument = given()
    shared = argument.exp()
    assert names([shared.sin(), shared.cos()], [argument]).count("ExpBackward0") == 1


def test_the_order_is_that_of_the_code() -> None:
    """A record and its recomputation agree on it, whatever ran in between."""

    def call(argument: Tensor) -> dict[str, list[Tensor]]:
        return {"out": [argument.exp() * argument.sin(), argument.tanh()]}

    first, second = given(), given()
    assert names(call(first), [first]) == names(call(second), [second])


def test_parameters_and_other_arguments_are_boundaries_too() -> None:
    linear, argument, other = torch.nn.Linear(3, 3), given(2, 3), given(2, 3)
    assert "MulBackward0" not in names(linear(argument) + other, ([argument], {"other": other}))


class _Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, argument: Tensor) -> Tensor:
        ctx.save_for_backward(argument, None, argument * 2)
        return argument.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        first, _, _ = ctx.saved_tensors
        return gradient + 0 * first


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (lambda argument: argument.exp(), 1),
        (lambda argument: argument * argument.sin(), 3),
        (lambda argument: torch.cat([argument, argument]), 0),
        (lambda argument: _Two.apply(argument), 2),
        (lambda argument: argument[torch.tensor([0, 2])], 1),
    ],
    ids=["exp", "mul and sin", "cat", "Python function", "index"],
)
def test_slots(call: Any, count: int) -> None:
    """Every saved tensor with the slot that holds it: of autograd's own nodes, of lists of tensors, of Python functions; a slot
    that holds nothing is none."""
    argument = given()
    output = call(argument)
    found = [(node, *pair) for node, _ in edges_between(output, [argument]) for pair in saved_in(node)]
    pairs = [(slot.among(getattr(node, slot.raws)), tensor) for node, slot, tensor in found]
    assert len(pairs) == count
    assert all(torch.equal(slot.among(getattr(node, slot.tensors)), tensor) for node, slot, tensor in found)
    unpacked: list[Tensor] = []

    def unpack(index: int) -> Tensor:
        unpacked.append(pairs[index][1])
        return pairs[index][1].detach()

    for index, (raw, _) in enumerate(pairs):
        raw.register_hooks(lambda saved, index=index: index, unpack)
    output.sum().backward()
    assert len(unpacked) == count, "the slot is the one that backward reads"


def test_the_memory_of_wrappers_is_that_of_their_parts() -> None:
    """As of weights in FP8, which wrap bytes and scales."""

    class Wrapper(Tensor):
        def get_metadata(self) -> dict[str, Any]:
            return {"data": data, "scale": scale, "dtype": "a format"}

    class Plain(Tensor):
        pass

    data, scale, plain, weight = torch.ones(2), torch.ones(1), torch.ones(2).as_subclass(Plain), torch.nn.Parameter(torch.ones(2))
    held = [torch.ones(2).as_subclass(Wrapper), plain, [weight]]
    assert [*map(id, memory_of(held))] == [*map(id, (data, scale, plain, weight))]


def test_storages_are_equal_where_memory_is_shared() -> None:
    tensor = torch.ones(4)
    assert storage_of(tensor) == storage_of(tensor[2:]) != storage_of(tensor.clone())


def test_detached_keeps_parameters() -> None:
    parameter, tensor = torch.nn.Parameter(torch.ones(2)), given()
    assert detached(parameter) is parameter
    assert detached(tensor).requires_grad
    assert detached(tensor).grad_fn is None
    assert storage_of(detached(tensor)) == storage_of(tensor)


def test_packing_is_on_for_a_while() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    packing = Packing(pack)
    argument = given()
    argument.exp()
    packing.turn(True)
    packing.turn(True)
    argument.exp()
    packing.turn(False)
    argument.exp()
    assert len(packed) == 1
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
