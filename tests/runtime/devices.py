"""Every device that this machine has, for tests whose bodies hold on all of them."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from megatron_lynx.runtime.device import Device, Event, device_for
from megatron_lynx.runtime.offload.copier import Copy

CPU = device_for(torch.device("cpu"))
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the CPU's streams are threads")
EVERY_KIND = ("cpu", pytest.param("cuda", marks=NEEDS_CUDA))

on_every_device = pytest.mark.parametrize("device", EVERY_KIND, indirect=True)


@pytest.fixture
def device(request: Any) -> Device:
    return device_for(torch.device(request.param))


def delay(device: Device) -> None:
    """Work that takes long, of whatever stream runs it."""
    if device.where.type == "cuda":
        torch.cuda._sleep(50_000_000)
    else:
        time.sleep(0.03)


def launches_block(device: Device) -> bool:
    """Whether each launch waits for its end, as under compute-sanitizer: then nothing is ever under way, and no order is seen."""
    return device.where.type == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"


def under_way(moment: Event | Copy, device: Device) -> bool:
    """Whether an event, or a copy's end, is still to come, as far as that can be said here."""
    return launches_block(device) or not moment.done
