"""Gloo's groups with one device for all of a rank's.

By default every group has a device of its own, whose thread looks for events a hundred times a second although nothing comes.
Megatron makes some twenty groups a rank: with four ranks, or with ranks that wait for work, a small machine is busy with looking.

    groups ──all──> one device ──> one thread, which the sockets of all groups wake
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed.distributed_c10d as c10d

INTERFACES = ("TORCH_GLOO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""The environment variables that name network interfaces, separated by commas, as PyTorch reads them."""
THREADS = 2
"""That run a group's collectives, for each device, as PyTorch has it."""


def share_one_device() -> None:
    """From now on, groups of this process that are made over gloo have one device (for each interface that is named)."""
    if not issubclass(c10d.ProcessGroupGloo, _OnOneDevice):
        c10d.ProcessGroupGloo = _OnOneDevice  # type: ignore[misc]


class _OnOneDevice(c10d.ProcessGroupGloo):
    """A group as PyTorch would make it, but for its device."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
        """`more`: what later releases of PyTorch say, in words of their options (`enable_reconfigure` from 2.14 on)."""
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        for name, value in more.items():
            setattr(options, name, value)
        options._devices = _devices()
        options._threads = THREADS * len(options._devices)
        options._timeout = timeout
        super().__init__(store, rank, size, options)


@cache
def _devices() -> list[Any]:
    """Those of the interfaces that the environment names, or of this machine's host name."""
    named = next((os.environ[name] for name in INTERFACES if os.environ.get(name)), "")
    interfaces = [interface for interface in named.split(",") if interface]
    make = c10d.ProcessGroupGloo
    return [make.create_device(interface=each) for each in interfaces] or [make.create_default_device()]
