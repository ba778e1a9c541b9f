"""Sends to a stage's neighbours and receives from them, between one action and the next.

    done   next    exchange                                          as in Megatron's 1F1B
    F      F       send forward; receive forward                     warm-up
    F      B       send forward and receive backward, together       steady: both with the stage behind
    B      F       send backward and receive forward, together       steady: both with the stage before
    B      B       send backward; receive backward                   cool-down
    any    none    send                                              the pipeline is empty

`Waiting` returns when all of it has arrived. `Posted` starts it: what is received is waited for when the next action needs it,
what is sent before the next message in that direction. So a stage that makes a deferred update need not find its neighbour at the
same place: one message may be on its way meanwhile.

Behind the last action of a run comes an update, and Megatron may wait there for the device and then for the other ranks. Nothing
may be posted then that the neighbour matches only behind its own update: such an exchange is postponed until the next run begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_lynx.schedule.action import Action

Tensors = list[torch.Tensor | None]
"""One tensor that stages exchange, in a list as Megatron's schedules keep it; none at the ends of the pipeline."""


class Exchange(ABC):
    """One stage's side of the exchanges. Every message has the same `shape`."""

    def __init__(self, group: Any, config: Any, shape: tuple[int, ...]) -> None:
        self.neighbours = P2PCommunicator(pp_group=group, config=config)
        self.config = config
        self.shape = shape
        self.first, self.last = group.rank() == 0, group.rank() == group.size() - 1
        self._postponed: tuple[Action, Tensors, Action | None] | None = None

    @abstractmethod
    def take(self, action: Action) -> Tensors:
        """What `action` needs: the input of a forward, the gradient of a backward's output."""

    @abstractmethod
    def pass_on(self, done: Action, made: Tensors, following: Action | None) -> None:
        """Send what `done` made, and receive what `following` needs."""

    def postpone(self, done: Action, made: Tensors, following: Action | None) -> None:
        """Pass on when the next run begins."""
        self._postponed = done, made, following

    def begin_postponed(self) -> None:
        """A run begins: pass on what the run before has postponed."""
        postponed, self._postponed = self._postponed, None
        if postponed is not None:
            self.pass_on(*postponed)


class Waiting(Exchange):
    """Exchanges with the communicator's own functions, which wait, as Megatron's schedules do."""

    _received: Tensors | None = None

    def take(self, action: Action) -> Tensors:
        received, self._received = self._received, None
        return self._receive(action) if received is None else received

    def pass_on(self, done: Action, made: Tensors, following: Action | None) -> None:
        neighbours, shapes = self.neighbours, [self.shape]
        if following is not None and done.kind != following.kind:
            if done.kind == "F":
                self._received = neighbours.send_forward_recv_backward(made, shapes, self.last)
            else:
                self._received = neighbours.send_backward_recv_forward(made, shapes, self.first)
            return
        if done.kind == "F":
            neighbours.send_forward(made, self.last)
        else:
            neighbours.send_backward(made, self.first)
        self._received = None if following is None else self._receive(following)

    def _receive(self, action: Action) -> Tensors:
        if action.kind == "F":
            return self.neighbours.recv_forward([self.shape], self.first)  # type: ignore[no-any-return]
        return self.neighbours.recv_backward([self.shape], self.last)  # type: ignore[no-any-return]


class Posted(Exchange):
    """Exchanges with the operations below the communicator, whose functions for messages in both directions all wait."""

    def __init__(self, group: Any, config: Any, shape: tuple[int, ...]) -> None:
        super().__init__(group, config, shape)
        self._group = group
        self._coming: torch.Tensor | None = None
        self._work: dict[str, tuple[Any, torch.Tensor | None]] = {}
        """Messages under way, by Megatron's name for the direction, with the tensors that must live until they have arrived."""
        self._begun = False

    def take(self, action: Action) -> Tensors:
        if not self._begun:
            self._post({}, action)
        for name in ("recv_prev", "recv_next"):
            self._wait_for(name)
        coming, self._coming, self._begun = self._coming, None, False
        return [coming]

    def pass_on(self, done: Action, made: Tensors, following: Action | None) -> None:
        direction, at_end = ("send_next", self.last) if done.kind == "F" else ("send_prev", self.first)
        message = None if at_end or made[0] is None else made[0].detach()
        self._wait_for(direction)
        self._post({direction: message}, following)
        if following is None:
            for name in list(self._work):
                self._wait_for(name)

    def _post(self, sent: dict[str, torch.Tensor | None], following: Action | None) -> None:
        wanted = None
        if following is not None:
            self._begun = True
            at_end = self.first if following.kind == "F" else self.last
            wanted = None if at_end else "recv_prev" if following.kind == "F" else "recv_next"
        if wanted:
            self._coming = torch.empty(
                self.shape, requires_grad=True, device=torch.cuda.current_device(), dtype=self.config.pipeline_dtype
            )
        under_way = p2p_communication._p2p_ops(
            tensor_send_prev=sent.get("send_prev"),
            tensor_recv_prev=self._coming if wanted == "recv_prev" else None,
            tensor_send_next=sent.get("send_next"),
            tensor_recv_next=self._coming if wanted == "recv_next" else None,
            group=self._group,
            prev_pipeline_rank=self.neighbours.prev_rank,
            next_pipeline_rank=self.neighbours.next_rank,
        )
        for name, work in under_way.items():
            self._work[name] = work, sent.get(name)

    def _wait_for(self, name: str) -> None:
        work, _ = self._work.pop(name, (None, None))
        if work is not None:
            work.wait()
