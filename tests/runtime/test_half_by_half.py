"""Offloading within one micro-batch: what leaves behind which half, when it is let go, and when it comes back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_lynx.anatomy import DENSE, HALVES
from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.frame import HalfPolicy
from megatron_lynx.runtime.host_memory import ALIGNMENT, HostLimit
from megatron_lynx.runtime.offload import Offloader, OffloadGroup, OffloadPolicy
from megatron_lynx.runtime.order import StageOrder
from megatron_lynx.schedule.schedule import Action
from tests.runtime.devices import CPU, delay, drain, moved_bytes, on_every_device
from tests.runtime.devices import device as device

LAYERS = 3
BLOCK = 256
"""Bytes of each tensor."""
SAVED = 3 * BLOCK
"""What each half saves: its input, which is what tanh saved in the half before, and two more."""
KEPT = [HalfPolicy(layer, DENSE[half], recompute=frozenset()) for layer in range(1, LAYERS + 1) for half in HALVES]
ORDER = StageOrder([(Action(number, kind, 0), "steady") for number in range(2) for kind in ("F", "B")])  # type: ignore[arg-type]


def code(hidden: Tensor) -> Tensor:
    return (hidden.sin() * hidden.exp()).tanh()


def engine_of(size_bytes: int, pace_bytes: int | None, device: Device = CPU) -> Engine:
    policy = OffloadPolicy(size_bytes, 1, sets=1, pace_bytes=pace_bytes, layers=(1, LAYERS))
    offloader = Offloader({0: policy}, device=device, limit=HostLimit(10**9))
    return Engine(order=lambda microbatches: ORDER, offloader=offloader, device=device)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = engine_of(10**6, 10**6)
    yield made
    made.offloader.close()


def forward(engine: Engine, number: int = 0, fails_behind: int | None = None) -> tuple[Tensor, Tensor]:
    given = torch.full((64,), 0.1 * (number + 1), requires_grad=True)
    with engine.forward_pass(number, 0, 2) as ended_with:
        output = given * 1
        for policy in KEPT:
            output = engine.half(policy, code, (output,), {})
            if policy is KEPT[fails_behind or 0] and fails_behind is not None:
                raise ValueError("in the middle")
        ended_with(output)
    return given, output


def backward(engine: Engine, output: Tensor) -> None:
    with engine.backward_pass(output):
        output.sum().backward()


def step(engine: Engine) -> list[Tensor]:
    gradients = []
    for number in range(2):
        given, output = forward(engine, number)
        backward(engine, output)
        assert given.grad is not None
        gradients.append(given.grad)
    return gradients


def expected() -> list[Tensor]:
    engine = engine_of(10**6, None)
    gradients = step(engine)
    assert engine.take_counts().offloaded_bytes == 0, "without a pace it stays, as it always did"
    engine.offloader.close()
    return gradients


def left() -> list[str]:
    gc.collect()
    return [type(thing).__name__ for thing in gc.get_objects() if type(thing).__name__ in ("Frame", "OffloadedStorage", "Lease")]


@pytest.mark.parametrize("size_bytes", [1, 1000, 10**6])
@pytest.mark.parametrize("pace_bytes", [1, 700, 10**6])
def test_gradients_and_bytes(size_bytes: int, pace_bytes: int) -> None:
    engine = engine_of(size_bytes, pace_bytes)
    assert all(torch.equal(one, other) for one, other in zip(step(engine), expected(), strict=True))
    counts = engine.take_counts()
    everything = (len(KEPT) - 1) * SAVED - BLOCK  # what the first half was given stays
    assert counts.offloaded_bytes == counts.reloaded_bytes == 2 * min(size_bytes, everything)
    assert 0 <= counts.host_bytes - counts.offloaded_bytes // 2 < ALIGNMENT, "one micro-batch at a time, its blocks lent again"
    assert left() == []
    engine.offloader.close()


def test_each_half_leaves_when_it_is_over_and_the_last_one_stays(engine: Engine) -> None:
    started, reached = list[int](), list[int]()
    given = torch.full((64,), 0.3, requires_grad=True)
    with engine.forward_pass(0, 0, 2) as ended_with:
        output = given * 1
        for policy in KEPT:
            output = engine.half(policy, code, (output,), {})
            started.append(moved_bytes(engine.offloader)[0])
        ended_with(output)
    assert all(started[:-1]), "something of every half"
    assert started[-1] == 0
    enter = OffloadGroup.backward_reaches

    def reaching(*where: Any) -> None:
        enter(*where)
        reached.append(moved_bytes(engine.offloader)[1])

    with mock.patch.object(OffloadGroup, "backward_reaches", reaching):
        backward(engine, output)
    assert reached == [*reversed(started[:-1]), 0], "of the half before the one that backward comes to"


def test_originals_go_at_their_turn_and_not_when_a_copy_happens_to_be_over() -> None:
    """At a pace of a half's bytes the first half is away behind the second one; at a slow pace, behind the last."""
    for pace_bytes, away in ((10**6, {1, 2, 3, 4}), (SAVED // 2, {1, 2}), (1, set())):
        engine = engine_of(10**6, pace_bytes)
        with engine.forward_pass(0, 0, 2) as ended_with:
            output = torch.full((64,), 0.3, requires_grad=True) * 1
            for policy in KEPT[:-1]:
                output = engine.half(policy, code, (output,), {})
                drain(engine.offloader.out)
                engine.offloader.settle()
            storages = {id(thing): thing for thing in gc.get_objects() if type(thing).__name__ == "OffloadedStorage"}
            assert engine.ledger.recording is not None
            sent = dict(enumerate(engine.ledger.recording.group._away, start=1))
            gone = {half for half, one in sent.items() if not any(storage._original is not None for storage in one.alive())}
            assert gone == away, pace_bytes
            output = engine.half(KEPT[-1], code, (output,), {})
            assert not any(storage._original is not None for storage in storages.values() if storage._out is not None), (
                "behind the last at the latest"
            )
            ended_with(output)
            del storages
        backward(engine, output)
        engine.offloader.close()


@pytest.mark.parametrize("where", ["forward", "offload", "reload"])
def test_a_step_that_fails_in_the_middle_leaves_nothing_and_the_next_one_is_right(engine: Engine, where: str) -> None:
    wanted = expected()
    step(engine)
    copier: Any = engine.offloader.out if where == "offload" else engine.offloader.back
    usual, moved = copier.move, []

    def breaking(target: Tensor, source: Tensor) -> None:
        moved.append(target.nbytes)
        if len(moved) == 4:
            raise OSError("the link is down")
        target.copy_(source)

    if where == "forward":
        with pytest.raises(ValueError, match="in the middle"):
            forward(engine, 0, fails_behind=3)
    else:
        copier.move = breaking
        with pytest.raises(OSError, match="the link is down"):
            step(engine)
    copier.move = usual
    assert not engine.busy
    assert left() == []
    assert all(torch.equal(one, other) for one, other in zip(step(engine), wanted, strict=True))


@on_every_device
def test_memory_is_used_again_only_behind_its_copies(device: Device) -> None:
    """Kernels are late, and what is let go behind a half is allocated and overwritten at once."""
    on_cuda = device.where.type == "cuda"
    count = 1 << 22 if on_cuda else 1 << 12
    engine = engine_of(4 * count * 3 * len(KEPT), 4 * count * 3, device)
    for number in range(4):
        given = torch.full((count,), 0.1 * (number % 2 + 1), device=device.where, requires_grad=True)
        again = given.detach().requires_grad_()
        expected = again * 1
        for _ in KEPT:
            expected = code(expected)
        expected.sum().backward()
        del expected
        with engine.forward_pass(number % 2, 0, 2) as ended_with:
            output = given * 1
            for policy in KEPT:
                if on_cuda:
                    delay(device)
                output = engine.half(policy, code, (output,), {})
                torch.full((6 * count,), float("nan"), device=device.where)
            ended_with(output)
        with engine.backward_pass(output):
            torch.full((6 * count,), float("nan"), device=device.where)
            output.sum().backward()
        del output
        assert given.grad is not None
        assert again.grad is not None
        assert torch.equal(given.grad, again.grad)
    assert engine.take_counts().offloaded_bytes == 4 * 4 * count * (3 * (len(KEPT) - 1) - 1)
    engine.offloader.close()


def test_evaluation_moves_nothing(engine: Engine) -> None:
    with torch.no_grad():
        forward(engine)
    assert engine.take_counts().offloaded_bytes == 0


def test_a_device_without_room_to_come_back_to(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    _, output = forward(engine)

    def full(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError):
        backward(engine, output)
    monkeypatch.undo()
    assert not engine.busy
