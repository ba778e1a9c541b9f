"""Notes collectives and messages of process groups, as NCCL's groups would run them.

    called                               noted
    a collective                         on the group's communicator and stream
    isend, irecv                         on a communicator and stream of this pair of ranks in this group, both directions
    batch_isend_irecv                    all its messages at once, on the group's communicator
    work.wait()                          compute waits; the host goes on
    barrier                              a collective for which the host waits

`posted` tells of them, whatever name a library took from torch.distributed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_lynx.testbed.links import Posted
from tests.instruments.posted import WorkListener, listening_to_works
from tests.instruments.queues.log import Communicator, Direction, Event, Log, Message
from tests.instruments.replacing import replace

UNEQUAL = ("gather", "scatter", "all_to_all_single")
"""Collectives of which members may be given tensors of other sizes: those with a root, and rows of experts on their way."""
DIRECTIONS: dict[str, Direction] = {"send": "send", "recv": "receive"}


def note_communication(undo: ExitStack, log: Log) -> None:
    """Note what this process communicates, until `undo` is closed. The stand-in for CUDA is to be active."""
    notes = _Notes(log)
    batched = notes.batched(dist.batch_isend_irecv)
    for owner in (dist, c10d):
        replace(undo, owner, "batch_isend_irecv", batched)
    undo.enter_context(listening_to_works(notes))


class _Notes(WorkListener):
    def __init__(self, log: Log) -> None:
        self._log = log
        self._works: dict[int, tuple[Any, Event, str]] = {}
        """Works by identity, when they are over on the device, and what they do. They are held: identities must not return."""
        self._batch: list[Message] | None = None

    def posted(self, work: Any, posted: Posted, args: tuple[Any, ...]) -> None:
        if posted.peer is None:
            event = self._log.collective(_described(posted.operation, args), _communicator(posted.group))
            self._remember(work, event, posted.operation)
            return
        direction, other = DIRECTIONS[posted.operation], dist.get_global_rank(posted.group, posted.peer)
        elements = sum(tensor.numel() for tensor in args[0])
        if self._batch is None:
            event = self._log.message(direction, other, _pair(posted.group, other), elements)
            self._remember(work, event, direction)
        else:
            self._batch.append(Message(direction, other, elements))

    def waits(self, work: Any) -> None:
        _, event, name = self._works.pop(id(work), (None, None, ""))
        if event is not None and name == "barrier":
            self._log.synchronize("barrier", [event])
        elif event is not None:
            self._log.wait(event)

    def batched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def post(operations: Any) -> Any:
            self._batch = []
            works = original(operations)
            messages, self._batch = self._batch, None
            event = self._log.messages(messages, _communicator(operations[0].group or dist.group.WORLD))
            for work in works:
                self._remember(work, event, "messages")
            return works

        return post

    def _remember(self, work: Any, event: Event, name: str) -> None:
        self._works[id(work)] = work, event, name


def _communicator(group: Any) -> Communicator:
    return Communicator(f"{group.group_desc} ({group.group_name})", tuple(dist.get_process_group_ranks(group)))


def _pair(group: Any, other: int) -> Communicator:
    low, high = sorted((dist.get_rank(), other))
    return Communicator(f"{group.group_desc} ({group.group_name}), one pair", (low, high))


def _described(name: str, args: tuple[Any, ...]) -> str:
    """The collective and the size of the first tensor it is given, where that is equal on all members."""
    first = args[0] if args and name not in UNEQUAL else None
    while isinstance(first, list | tuple) and first:
        first = first[0]
    return f"{name} of {first.numel()} elements" if isinstance(first, torch.Tensor) else name
