"""Every device that this machine has, for tests whose bodies hold on all of them."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from megatron_lynx.runtime.device import Copier, Copy, Device, Event, device_for
from megatron_lynx.runtime.offload import Offloader
from tests.instruments.streams.asynchronous import AsynchronousDevice
from tests.instruments.streams.happens_before import HappensBefore

CPU = device_for(torch.device("cpu"))
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = pytest.param("cuda", marks=NEEDS_CUDA)

on_every_device = pytest.mark.parametrize("device", ["cpu", "asynchronous", GPU], indirect=True)
where_copies_take_time = pytest.mark.parametrize("device", ["asynchronous", GPU], indirect=True)
where_streams_have_a_clock = pytest.mark.parametrize("device", ["cpu", GPU], indirect=True)


def asynchronous() -> AsynchronousDevice:
    """A CPU with streams. An event is done only when the host has waited for it."""
    return AsynchronousDevice(torch.device("cpu"), seed=1, listener=HappensBefore())


@pytest.fixture
def device(request: Any) -> Device:
    return asynchronous() if request.param == "asynchronous" else device_for(torch.device(request.param))


def delay(device: Device) -> None:
    """Work that takes long, of whatever stream runs it."""
    if device.where.type == "cuda":
        torch.cuda._sleep(50_000_000)
    else:
        time.sleep(0.03)


def launches_block(device: Device) -> bool:
    """Whether each launch waits for its end, as under compute-sanitizer: then no order is seen."""
    return device.where.type == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"


def under_way(moment: Event | Copy, device: Device) -> bool:
    """Whether an event, or a copy's end, is still to come, as far as the device can say."""
    over = moment.done if isinstance(moment, Copy) else moment.query()
    return device is CPU or launches_block(device) or not over


def drain(copier: Copier) -> None:
    """Wait on the host for all copies issued so far."""
    copier._device.record(copier._stream).synchronize()
    copier.settle()


def moved_bytes(offloader: Offloader) -> tuple[int, ...]:
    """Bytes copied (out, back) since the last call."""
    return tuple(copier.take_bytes() for copier in offloader.copiers)


def waited_s(offloader: Offloader) -> float:
    """For which compute waited for copies since the last call."""
    return sum(copier.take_waited_s() for copier in offloader.copiers)
