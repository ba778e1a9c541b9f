"""The engine with an offloader, on plain torch code: two micro-batches of one half."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx.anatomy import MLP
from megatron_lynx.errors import RecomputeError
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.frame import ChunkPolicy, HalfPolicy
from megatron_lynx.runtime.host_memory import HostLimit
from megatron_lynx.runtime.offload import Offloader, OffloadPolicy
from megatron_lynx.runtime.order import StageOrder
from megatron_lynx.schedule.schedule import Action
from tests.runtime.devices import CPU, drain

KEEPS_ALL = HalfPolicy(layer=1, section=MLP, recompute=frozenset())
TWO_IN_FLIGHT = StageOrder(
    [
        *((Action(number, "F", 0), "warmup") for number in range(2)),
        *((Action(number, "B", 0), "cooldown") for number in range(2)),
    ]
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    offloader = Offloader({0: OffloadPolicy(10**6, 1, 2)}, device=CPU, limit=HostLimit(10**7))
    made = Engine(order=lambda microbatches: TWO_IN_FLIGHT, offloader=offloader)
    yield made
    made.offloader.close()


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


def test_a_half_that_stays_keeps_all_on_the_device(engine: Engine) -> None:
    """Though what others of its chunk keep goes to the host: experts' rows, or what is made again before its own backward."""
    with engine.forward_pass(0, 0, 2) as ended_with:
        output = engine.half(replace(KEEPS_ALL, stays=True), code, (torch.ones(64, requires_grad=True) * 1,), {})
        ended_with(output)
    backward(engine, output)
    assert engine.take_counts().offloaded_bytes == 0


@pytest.mark.parametrize("overlapping", [False, True], ids=["steps", "batches that overlap"])
def test_weights_that_move_between_steps_stay_and_activations_go(overlapping: bool) -> None:
    """The optimizer, or a second version of the weights, replaces them; an activation may then lie where they were."""
    weights = [torch.full((64,), 0.5)]
    offloader = Offloader({0: OffloadPolicy(10**6, 1, 2)}, device=CPU, limit=HostLimit(10**7), lasting=lambda chunk: weights)
    engine, gone = Engine(order=lambda microbatches: TWO_IN_FLIGHT, offloader=offloader), []
    old = weights[0]
    for step in range(2):
        given = [torch.full((64,), 0.1, requires_grad=True) for _ in range(2)]
        if overlapping:
            engine.begin_batch(TWO_IN_FLIGHT, fills=step == 0)
        outputs = []
        for number, tensor in enumerate(given):
            other = (old if step and number else torch.empty(64)).copy_(tensor.detach())
            with engine.forward_pass(number, 0, 2) as ended_with:
                outputs.append(engine.half(KEEPS_ALL, lambda one, other=other: one * weights[0] * other, (tensor * 1,), {}))
                ended_with(outputs[-1])
        for output in outputs:
            backward(engine, output)
        gone.append(engine.take_counts().offloaded_bytes)
        weights[:] = [weights[0].clone()]
    assert gone[0] == gone[1] > 0
    engine.offloader.close()


def test_the_first_reload_starts_when_its_gradient_is_waited_for(engine: Engine) -> None:
    passes = [forward(engine, number) for number in range(2)]
    engine.take_counts()
    engine.receive([Work()])[0].wait()
    assert engine.take_counts().reloaded_bytes > 0
    with engine.backward_pass(passes[0][1]):
        drain(engine.offloader.back)
        assert engine.take_counts().reloaded_bytes > 0, "the second one's, one backward before its own"


def test_a_device_without_room_to_reload_to_fails_the_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of any pass, too: while a gradient is waited for."""

    def full(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    passes = [forward(engine, number) for number in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        with pytest.raises(torch.OutOfMemoryError):
            engine.receive([Work()])[0].wait()
    assert not engine.busy
    del passes


INTERLEAVED = StageOrder(
    [
        *((Action(number, "F", chunk), "warmup") for chunk in range(2) for number in range(2)),
        *((Action(number, "B", chunk), "cooldown") for chunk in (1, 0) for number in range(2)),
    ]
)
"""Two chunks of one stage, two micro-batches."""


def passes_of_a_step(engine: Engine, fails_at: tuple[str, int, int] | None = None) -> list[Tensor]:
    """The gradients of what goes into each forward. `fails_at`: the pass that raises before it ends."""
    given, outputs = {}, {}
    for one, _ in INTERLEAVED.all:
        fails = (one.kind, *one.virtual) == fails_at
        if one.kind == "F":
            given[one.virtual] = torch.full((64,), 0.1 * (one.micro_batch + 2 * one.chunk + 1), requires_grad=True)
            policy = replace(KEEPS_ALL, layer=one.chunk + 1, chunk=one.chunk)
            with engine.forward_pass(*one.virtual, 2) as ended_with:
                outputs[one.virtual] = engine.half(policy, code, (given[one.virtual] * 1,), {})
                if fails:
                    raise ValueError("in the middle")
                ended_with(outputs[one.virtual])
        else:
            engine.offloader.exchange_begins()
            engine.receive([Work()])[0].wait()
            with engine.backward_pass(outputs[one.virtual]):
                outputs.pop(one.virtual).sum().backward()
                if fails:
                    raise ValueError("in the middle")
    return [tensor.grad for _, tensor in sorted(given.items()) if tensor.grad is not None]


@pytest.mark.parametrize("where", [("F", 1, 1), ("B", 0, 1), "offload", "reload"])
@pytest.mark.parametrize("avoids_messages", [False, True])
def test_a_step_of_two_chunks_that_fails_in_the_middle(where: Any, avoids_messages: bool) -> None:
    """Nothing is held afterwards, and the next step is right: once it
    was not, because host memory that a failed copy had to do with was lent again, and failed with it."""
    policies = {chunk: OffloadPolicy(10**6, 1, 2, avoids_messages=avoids_messages) for chunk in range(2)}
    offloader = Offloader(policies, device=CPU, limit=HostLimit(10**7))
    engine = Engine(chunks=[ChunkPolicy(), ChunkPolicy()], order=lambda microbatches: INTERLEAVED, offloader=offloader)
    expected = passes_of_a_step(engine)
    assert engine.take_counts().offloaded_bytes > 0
    copier: Any = offloader.out if where == "offload" else offloader.back
    usual, moved = copier.move, []

    def breaking(target: Tensor, source: Tensor) -> None:
        moved.append(target.nbytes)
        if len(moved) == 5:
            raise OSError("the link is down")
        target.copy_(source)

    if where in ("offload", "reload"):
        copier.move = breaking
        with pytest.raises(OSError, match="the link is down"):
            passes_of_a_step(engine)
    else:
        with pytest.raises(ValueError, match="in the middle"):
            passes_of_a_step(engine, where)
    copier.move = usual
    assert not engine.busy
    gc.collect()
    assert [thing for thing in gc.get_objects() if type(thing).__name__ in ("Frame", "OffloadedStorage", "Lease")] == []
    again = passes_of_a_step(engine)
    assert len(again) == len(expected) == 4
    assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))
    engine.offloader.close()


def test_micro_batches_that_keep_everything_keep_it_on_the_device() -> None:
    offloader = Offloader({0: OffloadPolicy(10**6, 1, 2)}, device=CPU, limit=HostLimit(10**7))
    engine = Engine(chunks=[ChunkPolicy(whole=(0,))], order=lambda microbatches: TWO_IN_FLIGHT, offloader=offloader)
    for _, output in [forward(engine, number) for number in range(2)]:
        backward(engine, output)
    assert engine.take_counts().offloaded_bytes == 3 * 256
    engine.offloader.close()


def test_hooks_of_somebody_else_are_refused(engine: Engine) -> None:
    """They would be handed handles, or nothing (rule R14)."""
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        pytest.raises(RecomputeError, match="other saved-tensor hooks are active"),
    ):
        forward(engine, 0)
    assert not engine.busy


def test_what_comes_back_at_once_does_not_leave() -> None:
    """As on the last stage, or with one micro-batch."""
    offloader = Offloader({0: OffloadPolicy(10**6, 1, 1)}, device=CPU, limit=HostLimit(10**7))
    at_once = StageOrder([(Action(0, "F", 0), "steady"), (Action(0, "B", 0), "steady")])
    engine = Engine(order=lambda microbatches: at_once, offloader=offloader)
    _, output = forward(engine, 0)
    backward(engine, output)
    assert engine.take_counts().offloaded_bytes == 0
    engine.offloader.close()
