"""The engine with an offloader, on plain torch code: two micro-batches of one half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx.errors import OffloadError, ReplayError
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.frame import HalfPolicy
from megatron_lynx.runtime.offload import Offloader
from megatron_lynx.runtime.shipment import OffloadPolicy
from megatron_lynx.runtime.turns import Turn, Turns
from megatron_lynx.runtime.window import Agenda

KEEPS_ALL = HalfPolicy(layer=1, half="mlp", replay=frozenset(), code_behind={}, row_parallel="linear_fc2")
TWO_IN_FLIGHT = Turns(
    [*(Turn("F", number, 0, "warmup") for number in range(2)), *(Turn("B", number, 0, "cooldown") for number in range(2))]
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    offloader = Offloader({0: OffloadPolicy(10**6, 1, 1, 2)}, device=torch.device("cpu"), limit_bytes=10**7)
    made = Engine(order=lambda microbatches: TWO_IN_FLIGHT, offloader=offloader)
    yield made
    made.close()


def code(hidden: Tensor) -> Tensor:
    return (hidden.sin() * hidden.exp()).tanh()


def forward(engine: Engine, number: int) -> tuple[Tensor, Tensor]:
    """What goes in, and what comes out."""
    given = torch.full((64,), 0.1 * (number + 1), requires_grad=True)
    with engine.forward_pass(number, 0, 2) as ended_with:
        output = engine.half(KEEPS_ALL, code, (given * 1,), {})
        ended_with(output)
    return given, output


def backward(engine: Engine, output: Tensor) -> None:
    with engine.backward_pass(output):
        output.sum().backward()


class Work:
    def wait(self) -> bool:
        return True


def test_gradients_and_counts(engine: Engine) -> None:
    passes = [forward(engine, number) for number in range(2)]
    for given, output in passes:
        engine.receive([Work()])[0].wait()
        backward(engine, output)
        again = given.detach().requires_grad_()
        code(again * 1).sum().backward()
        assert given.grad is not None
        assert again.grad is not None
        assert torch.equal(given.grad, again.grad)
    counts = engine.take_counts()
    assert counts.offloaded_bytes == counts.reloaded_bytes == 2 * 3 * 256, "tanh saves the output, which stays"
    assert counts.host_bytes == counts.offloaded_bytes, "both were on the host at once"
    assert engine.take_counts().offloaded_bytes == 0


def test_the_first_reload_starts_when_its_gradient_is_waited_for(engine: Engine) -> None:
    passes = [forward(engine, number) for number in range(2)]
    engine.take_counts()
    engine.receive([Work()])[0].wait()
    assert engine.take_counts().reloaded_bytes > 0
    with engine.backward_pass(passes[0][1]):
        engine.offloader.back.drain()  # type: ignore[union-attr]
        assert engine.take_counts().reloaded_bytes > 0, "the second one's, one backward before its own"


def test_a_device_without_room_to_reload_to_fails_the_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of any pass, too: while a gradient is waited for."""

    def full(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    passes = [forward(engine, number) for number in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        with pytest.raises(OffloadError, match="copying activations back from the host failed") as failed:
            engine.receive([Work()])[0].wait()
    assert failed.value.problems[0].where.startswith("stage 0, micro-batch 0 of this run, ")
    assert "CUDA out of memory" in failed.value.problems[0].found
    assert not engine.busy
    del passes


def test_micro_batches_that_keep_everything_keep_it_on_the_device() -> None:
    offloader = Offloader({0: OffloadPolicy(10**6, 1, 1, 2)}, device=torch.device("cpu"), limit_bytes=10**7)
    engine = Engine([Agenda(whole=(0,))], order=lambda microbatches: TWO_IN_FLIGHT, offloader=offloader)
    for _, output in [forward(engine, number) for number in range(2)]:
        backward(engine, output)
    assert engine.take_counts().offloaded_bytes == 3 * 256
    engine.close()


def test_hooks_of_somebody_else_are_refused(engine: Engine) -> None:
    """They would be handed handles, or nothing (rule R14)."""
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        pytest.raises(ReplayError, match="other saved-tensor hooks are active"),
    ):
        forward(engine, 0)
    assert not engine.busy


def test_what_comes_back_at_once_does_not_leave() -> None:
    """As on the last stage, or with one micro-batch."""
    offloader = Offloader({0: OffloadPolicy(10**6, 1, 1, 1)}, device=torch.device("cpu"), limit_bytes=10**7)
    at_once = Turns([Turn("F", 0, 0, "steady"), Turn("B", 0, 0, "steady")])
    engine = Engine(order=lambda microbatches: at_once, offloader=offloader)
    _, output = forward(engine, 0)
    backward(engine, output)
    assert engine.take_counts().offloaded_bytes == 0
    engine.close()
