"""A half with compiled sites and compiled code between them: what they save is let go and made again like anything else.

A compiled function is one node of autograd (`CompiledFunctionBackward`), with saved tensors of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

from megatron_lynx.runtime.frame import Absent
from tests.instruments.compiler import stand_in_for_compiler
from tests.runtime.tiny_half import ACTIVATION, FC1, FC2, FLOAT_BYTES, NORM, RESIDUAL, ROWS, WIDTH, TinyHalf, recomputed, recorded


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with stand_in_for_compiler("aot_eager"):
        yield
    torch._dynamo.reset()


class Compiled(TinyHalf):
    """Compiled are all three sites, the activation, and the dropout with what is added behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = (  # type: ignore[assignment]
            torch.compile(site) for site in (self.norm, torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH))
        )
        self.activation = torch.compile(torch.nn.functional.gelu)
        self.residual = torch.compile(lambda narrow, hidden: torch.nn.functional.dropout(narrow, 0.5) + hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self._site(NORM, self.norm, hidden)
        wide = self.activation(self._site(FC1, self.fc1, normed))
        return self.residual(self._site(FC2, self.fc2, wide), hidden)  # type: ignore[no-any-return]


def made() -> tuple[Compiled, Tensor]:
    """A half and what goes into it, run forward and backward once: everything is compiled."""
    torch.manual_seed(1)
    half, hidden = Compiled(), torch.randn(ROWS, WIDTH, requires_grad=True)
    torch.manual_seed(2)
    half(hidden).sum().backward()
    return half, hidden


@pytest.mark.parametrize(
    ("recompute", "let_go_floats"),
    [
        ([NORM], ROWS * WIDTH + 2 * ROWS),
        ([ACTIVATION], 2 * ROWS * 2 * WIDTH),
        ([RESIDUAL], ROWS * WIDTH / FLOAT_BYTES),
        ([NORM, FC1, ACTIVATION, RESIDUAL], ROWS * WIDTH + 2 * ROWS + 2 * ROWS * 2 * WIDTH + ROWS * WIDTH / FLOAT_BYTES),
    ],
    ids=["norm", "activation", "residual", "all"],
)
def test_gradients_are_equal_and_a_recomputation_compiles_nothing(recompute: list[str], let_go_floats: float) -> None:
    """What is let go: a norm's statistics and output (its input is the half's); what gelu and fc2 read; a mask of bytes."""
    half, hidden = made()
    wanted = [hidden.grad, *half.gradients()]
    half.zero_grad()
    hidden.grad = None
    clear_compilation_metrics()
    torch.manual_seed(2)
    frame, output = recorded(half, hidden, recompute)
    assert frame.let_go_bytes == let_go_floats * FLOAT_BYTES
    output.sum().backward()
    assert get_compilation_metrics() == []
    assert all(torch.equal(one, other) for one, other in zip(wanted, [hidden.grad, *half.gradients()], strict=True))  # type: ignore
    assert not frame.lets_go
    assert not frame.results


def test_a_tensor_that_a_compiled_site_saved_is_gone() -> None:
    """And is there again after the recomputation: no other reference than the handle's is left on the node."""
    half, hidden = made()
    frame, output = recorded(half, hidden, [NORM])
    statistics = [tensor for tensor in _saved_behind(output) if tensor.shape == (ROWS, 1)]
    assert statistics == []
    recomputed(half, frame)
    assert [tuple(tensor.shape) for tensor in frame.results.values()].count((ROWS, 1)) == 2


def _saved_behind(output: Tensor) -> list[Tensor]:
    """Every tensor that nodes behind the output still hold, without asking for those that were let go."""
    held: list[Tensor] = []
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        held += [raw.data for raw in getattr(node, "_raw_saved_tensors", ()) if isinstance(raw.data, Tensor)]
        waiting += [behind for behind, _ in node.next_functions if behind is not None]
    return held


class _Aside(torch.autograd.Function):
    """Keeps a tensor on its context, beside what it saves."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        ctx.mask = torch.rand_like(given)
        ctx.save_for_backward(given)
        return given * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (given,) = ctx.saved_tensors
        return gradient * ctx.mask + 0 * given


def test_what_a_compiled_function_keeps_aside_stays() -> None:
    """No hook sees it: it is neither let go nor counted, and backward has it."""
    half, hidden = made()
    half.activation = torch.compile(lambda wide: _Aside.apply(wide))
    gradients = []
    for recompute in ([], [ACTIVATION]):
        half.zero_grad()
        torch.manual_seed(2)
        frame, output = recorded(half, hidden, recompute)
        output.sum().backward()
        gradients.append([gradient.clone() for gradient in half.gradients()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert frame.let_go_bytes == 2 * ROWS * 2 * WIDTH * FLOAT_BYTES, "its input, and fc2's"


@pytest.mark.parametrize("tensor", [torch.ones(3, 4), torch.ones(4, 3).t(), torch.ones(2, 3, 8)[:, :, ::2]], ids=str)
def test_what_stands_for_a_tensor_has_its_geometry(tensor: Tensor) -> None:
    for asks in (False, True):
        stands = Absent.of(tensor.requires_grad_(asks)).made()
        assert (stands.shape, stands.stride(), stands.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert stands.requires_grad == asks
