"""What the runtime asks of a device: streams, events, waiting, a clock, random-number states and page-locked host memory."""

from __future__ import annotations

from functools import cache

import torch

from megatron_lynx.runtime.device.cpu import CpuDevice
from megatron_lynx.runtime.device.cuda import CudaDevice
from megatron_lynx.runtime.device.device import Device, Event, Stream

__all__ = ["Device", "Event", "Stream", "device_for", "present_device"]


def device_for(where: torch.device) -> Device:
    """The device on which a tensor lands that is put there: the same object each time."""
    return _made(torch.empty(0, device=where).device)


def present_device() -> Device:
    """The device that this process computes on: the current CUDA device where CUDA is in use, else the CPU."""
    return device_for(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


@cache
def _made(where: torch.device) -> Device:
    return CudaDevice(where) if where.type == "cuda" else CpuDevice(where)
