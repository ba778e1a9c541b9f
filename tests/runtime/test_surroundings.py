"""What a recomputation runs under is what its record ran under: torch's autocast, of the GPU as of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_lynx.runtime.surroundings import Autocast, Surroundings, unmarked


@pytest.fixture
def on_cuda() -> Iterator[None]:
    """As in Megatron's forward step on a GPU. (`torch.autocast("cuda")` turns itself off where there is none.)"""
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", dtype)


def test_autocast_of_a_gpu_is_captured(on_cuda: None) -> None:
    """A recomputation in backward would run in FP32 what its forward ran in BF16."""
    captured = {kind: dtype for kind, dtype, _ in Autocast().capture()}
    assert captured == {"cuda": torch.bfloat16, "cpu": None}


def test_autocast_is_as_captured_inside_and_as_before_behind() -> None:
    autocast = Autocast()
    with torch.autocast("cpu", torch.bfloat16):
        recorded = autocast.capture()
    before = autocast.capture()
    with autocast.as_captured(recorded):
        assert autocast.capture() == recorded != before
    assert autocast.capture() == before


def test_objects_are_as_they_were_behind_a_recomputation() -> None:
    class Dispatcher:
        """Its methods hand one another what they know of a call as attributes."""

    dispatcher = Dispatcher()
    dispatcher.splits = splits = [1, 2]  # type: ignore[attr-defined]
    with unmarked([dispatcher]):
        dispatcher.splits, dispatcher.probs = [3], "of another call"  # type: ignore[attr-defined]
    assert vars(dispatcher) == {"splits": splits}


def test_default_hooks_are_off_inside_and_as_before_afterwards() -> None:
    """In their order; also after an error."""
    seen: list[str] = []

    def noting(name: str) -> torch.autograd.graph.saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            seen.append(name)
            return tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def failing() -> None:
        given.exp()
        raise ZeroDivisionError

    given = torch.ones(2, requires_grad=True)
    surroundings = Surroundings([Autocast()])
    captured = surroundings.capture()
    with noting("outer"):
        with noting("inner"):
            with pytest.raises(ZeroDivisionError), surroundings.as_captured(captured):
                failing()
            assert seen == []
            given.exp()
        given.exp()
    given.exp()
    assert seen == ["inner", "outer"]
