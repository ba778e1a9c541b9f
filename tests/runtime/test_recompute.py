"""How far a recomputation runs, and that it goes on where an earlier one stopped."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron_lynx.anatomy import MLP
from megatron_lynx.runtime.frame import Frame
from tests.runtime.tiny_half import ACTIVATION, FC1, FC2, NORM, RESIDUAL, TinyHalf, made, recomputed, recorded

ALL = list(MLP.recomputable)


def frame_of(recompute: list[str]) -> tuple[TinyHalf, Frame, Tensor]:
    """With the output, which owns the graph."""
    half, hidden = made()
    torch.manual_seed(2)
    frame, output = recorded(half, hidden, recompute)
    return half, frame, output


def found_at_once(recompute: list[str]) -> dict[tuple[int, int], Tensor]:
    half, frame, _output = frame_of(recompute)
    recomputed(half, frame)
    return frame.results


@pytest.mark.parametrize(
    ("recompute", "runs"),
    [
        ([NORM], [NORM]),
        ([FC1], []),
        ([NORM, FC1], [NORM]),
        ([ACTIVATION], []),
        ([FC1, ACTIVATION], [FC1]),
        ([NORM, ACTIVATION], [NORM]),
        ([RESIDUAL], []),
        (ALL, [NORM, FC1]),
    ],
)
def test_sites_that_run(recompute: list[str], runs: list[str]) -> None:
    """It stops when nothing is wanted any more: linear_fc1 alone saves its input and nothing that its GEMM makes. Kept sites
    return their memo."""
    half, frame, _output = frame_of(recompute)
    recomputed(half, frame)
    assert half.ran == runs
    assert frame.wanted == set()


def test_a_recomputation_up_to_a_site() -> None:
    """It says what the site was called with, which is what a gather needs, and does not call it."""
    half, frame, _output = frame_of(ALL)
    reached = recomputed(half, frame, FC1)
    assert half.ran == [NORM]
    assert reached is not None
    assert torch.equal(reached, frame.results[3, -1]), "linear_fc1's input, which it saves"
    assert sorted(segment for segment, _ in frame.wanted) == [4, 5, 6]


@pytest.mark.parametrize("stops", [[FC1], [FC2], [FC1, FC2], [NORM, FC1, FC2], [FC1, FC1]], ids="+".join)
def test_the_next_recomputation_goes_on_from_there(stops: list[str]) -> None:
    """No site runs twice, and what is found is what one recomputation finds, in every bit."""
    half, frame, _output = frame_of(ALL)
    for until in stops:
        assert recomputed(half, frame, until) is not None
    recomputed(half, frame)
    assert half.ran == [NORM, FC1]
    assert frame.wanted == set()
    expected = found_at_once(ALL)
    assert frame.results.keys() == expected.keys()
    assert all(torch.equal(frame.results[key], tensor) for key, tensor in expected.items())


def test_each_part_makes_something_new() -> None:
    half, frame, _output = frame_of(ALL)
    left = [len(frame.wanted)]
    for until in (FC1, FC2, None):
        recomputed(half, frame, until)
        left.append(len(frame.wanted))
    assert all(later < earlier for earlier, later in pairwise(left))
    assert left[-1] == 0


def test_a_site_behind_the_last_wanted_tensor_is_not_reached() -> None:
    half, frame, _output = frame_of([NORM])
    assert recomputed(half, frame, FC2) is None
    assert half.ran == [NORM]
    assert frame.wanted == set()


def test_a_kept_site_can_be_where_a_recomputation_stops() -> None:
    half, frame, _output = frame_of([FC1, ACTIVATION, RESIDUAL])
    reached = recomputed(half, frame, FC2)
    assert reached is not None
    assert torch.equal(reached, frame.results[5, -2])
    assert half.ran == [FC1]


@pytest.mark.parametrize("until", [None, FC1, FC2])
def test_random_state_is_restored(until: str | None) -> None:
    """A recomputation draws what the record drew, and whoever draws next draws as if there had been none."""
    half, frame, _output = frame_of(ALL)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    recomputed(half, frame, until)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("stops", [[], [FC1], [FC2], [FC1, FC2]], ids="+".join)
def test_the_mask_behind_a_site_that_draws(stops: list[str]) -> None:
    """A kept site moved the random state on: the recomputation skips the site, but not what it drew."""
    gradients = []
    for recompute in ([], ALL):
        half, hidden = made()
        half.kept_dropout = 0.5
        torch.manual_seed(2)
        frame, output = recorded(half, hidden, recompute)
        for until in stops if recompute else []:
            recomputed(half, frame, until)
        output.sum().backward()
        gradients.append([hidden.grad, *half.gradients()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_what_backward_does_not_ask_for_is_dropped_with_the_graph() -> None:
    """Rule R8: handles own the frame, and nothing else does."""
    half, frame, output = frame_of(ALL)
    recomputed(half, frame, FC1)
    output.sum().backward()
    assert frame.results == {}
