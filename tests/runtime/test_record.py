"""What a recorded half lets go, what it remembers, and that backward does not notice."""

from __future__ import annotations

from collections import Counter
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx.anatomy import MLP
from megatron_lynx.runtime.frame import Absent
from megatron_lynx.runtime.saved import View, storage_of
from tests.runtime.tiny_half import ACTIVATION, FC1, FC2, FLOAT_BYTES, NORM, RESIDUAL, ROWS, WIDTH, made, recorded

SUBSETS = list(chain.from_iterable(combinations(MLP.recomputable, size) for size in range(len(MLP.recomputable) + 1)))


def stock() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, gradient of the input, gradients of the parameters."""
    half, hidden = made()
    torch.manual_seed(2)
    output = half(hidden)
    output.sum().backward()
    assert hidden.grad is not None
    return output, hidden.grad, half.gradients()


@pytest.mark.parametrize("recompute", SUBSETS, ids="+".join)
def test_gradients_are_those_without_a_record(recompute: tuple[str, ...]) -> None:
    """In every bit, whatever is recomputed, and with the same dropout mask."""
    half, hidden = made()
    torch.manual_seed(2)
    frame, output = recorded(half, hidden, recompute)
    torch.manual_seed(3)
    output.sum().backward()
    expected_output, expected, of_parameters = stock()
    assert hidden.grad is not None
    assert torch.equal(output, expected_output)
    assert torch.equal(hidden.grad, expected)
    assert all(torch.equal(one, other) for one, other in zip(half.gradients(), of_parameters, strict=True))
    assert frame.wanted == set()
    assert frame.results == {}


@pytest.mark.parametrize(
    ("recompute", "let_go"),
    [
        ([], {}),
        ([NORM], {1: 2, 3: 1}),
        ([FC1], {3: 1}),
        ([ACTIVATION], {4: 1, 5: 1}),
        ([FC1, ACTIVATION], {3: 1, 4: 1, 5: 1}),
        ([RESIDUAL], {6: 1}),
        ([NORM, FC1, ACTIVATION, RESIDUAL], {1: 2, 3: 1, 4: 1, 5: 1, 6: 1}),
    ],
)
def test_what_becomes_a_handle(recompute: list[str], let_go: dict[int, int]) -> None:
    """By segment. What a recomputed item saves, but for parameters and the half's own input, and what a kept site saves of an
    argument that a recomputation makes again: linear_fc1's of the norm, linear_fc2's of the activation."""
    frame, _ = recorded(*made(), recompute)
    assert Counter(segment for segment, _ in frame.wanted) == let_go


def test_bytes_that_are_let_go() -> None:
    frame, _ = recorded(*made(), [ACTIVATION])
    assert frame.let_go_bytes == 2 * ROWS * 2 * WIDTH * FLOAT_BYTES, "gelu's input, and linear_fc2's"


def test_a_tensor_that_is_let_go_is_gone() -> None:
    """The graph, the frame and the memos hold no second reference: its memory is what a plan saves."""
    half, hidden = made()
    activated: list[Any] = []
    original = half.fc2.forward
    half.fc2.forward = lambda given: (activated.append(torch._C._WeakTensorRef(given)), original(given))[1]  # type: ignore
    frame, _output = recorded(half, hidden, [ACTIVATION])
    assert frame.lets_go
    assert activated[0].expired()


@pytest.mark.parametrize(
    ("recompute", "memos"),
    [
        ([NORM], {}),
        ([FC1], {1: True}),
        ([ACTIVATION], {1: True, 3: True}),
        ([NORM, ACTIVATION], {3: True}),
        ([RESIDUAL], {1: False, 3: False, 5: False}),
        ([ACTIVATION, RESIDUAL], {1: True, 3: True, 5: False}),
    ],
)
def test_memos_that_remain(recompute: list[str], memos: dict[int, bool]) -> None:
    """By segment: kept sites that the recomputation will pass, and whether with values. What is only passed on the way to the
    residual addition needs none: its mask depends on the random state and the shape alone."""
    frame, _ = recorded(*made(), recompute)
    assert {segment: not isinstance(memo.outputs, Absent) for segment, memo in frame.memos.items()} == memos


def test_a_memo_knows_the_random_state_only_behind_a_site_that_draws() -> None:
    half, hidden = made()
    half.kept_dropout = 0.5
    frame, _ = recorded(half, hidden, [RESIDUAL])
    assert {segment: memo.random is not None for segment, memo in frame.memos.items()} == {1: False, 3: False, 5: True}


@pytest.mark.parametrize("recompute", [[], [NORM], [NORM, FC1, ACTIVATION]], ids=len)
def test_parameters_reach_backward_as_the_same_objects(recompute: list[str]) -> None:
    """Rule R11: default saved-tensor hooks would hand the backward a copy, without the attributes that Megatron puts there."""
    half, hidden = made()
    _, output = recorded(half, hidden, recompute)
    output.sum().backward()
    for linear in (half.fc1, half.fc2):
        assert [found is linear.weight for found in linear.used] == [True]


class _SavesAView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(given.t()[1:], weight)
        return given @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        view, weight = ctx.saved_tensors
        return gradient @ weight.t(), torch.cat([torch.zeros(1, view.size(1)), view]) @ gradient


def test_views_of_regenerated_arguments() -> None:
    """A kept site saves a part of its argument, turned around: it is found in the argument that a recomputation makes."""
    results = []
    for recompute in ([], [ACTIVATION]):
        half, hidden = made()
        half.fc2.forward = lambda given, weight=half.fc2.weight: _SavesAView.apply(given, weight)  # type: ignore
        torch.manual_seed(2)
        frame, output = recorded(half, hidden, recompute)
        views = list(frame.views.values())
        output.sum().backward()
        results.append(half.gradients())
    assert views == [View(dtype=torch.float32, size=(2 * WIDTH - 1, ROWS), stride=(1, 2 * WIDTH), offset=1)]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_an_argument_that_is_kept_stays_with_a_kept_site() -> None:
    """The norm is kept, so linear_fc1's input exists anyway: a handle for it would save nothing."""
    half, hidden = made()
    frame, _ = recorded(half, hidden, [ACTIVATION])
    assert not [key for key in frame.wanted if key[0] == 3]
    assert storage_of(hidden) not in {
        storage_of(memo.outputs) for memo in frame.memos.values() if isinstance(memo.outputs, Tensor)
    }


def test_the_row_parallel_site_is_never_recomputed() -> None:
    half, hidden = made()
    _, output = recorded(half, hidden, MLP.recomputable)
    output.sum().backward()
    assert FC2 not in half.ran
