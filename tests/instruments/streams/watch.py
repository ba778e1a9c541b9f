"""Puts asynchronous streams, and the account of what happens before what, around a training in this process.

with watched_streams(seed=1) as watched:
    with install(chunks, plan):
        train
watched.races      accesses that do not wait for each other, each named, with the place that asked for it
watched.found      what the delays of this run showed: memory that was let go while a copy used it
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from tests.instruments.posted import listening_to_works
from tests.instruments.replacing import replace
from tests.instruments.streams.asynchronous import AsynchronousDevice
from tests.instruments.streams.compute import Computing
from tests.instruments.streams.happens_before import HappensBefore


class Watched(NamedTuple):
    """A device under watch."""

    device: AsynchronousDevice
    account: HappensBefore

    @property
    def races(self) -> list[str]:
        return [str(race) for race in self.account.races]

    @property
    def found(self) -> list[str]:
        return self.device.found


@contextmanager
def watched_streams(seed: int) -> Iterator[Watched]:
    """Plans that are installed inside run their copies on asynchronous streams, late by random times from the seed."""
    account = HappensBefore()
    device = AsynchronousDevice(torch.device("cpu"), seed, account)
    synchronize = torch.cuda.synchronize

    @functools.wraps(synchronize, assigned=())
    def synchronize_all(*args: Any) -> None:
        synchronize(*args)
        device.synchronize()

    with ExitStack() as undo:
        replace(undo, importlib.import_module("megatron_lynx.apply.installation"), "device_for", lambda where: device)
        replace(undo, torch.cuda, "synchronize", synchronize_all)
        undo.enter_context(listening_to_works(account))
        undo.enter_context(Computing(account))
        yield Watched(device, account)
