"""Messages between a stage and its neighbours, between one action and the next.

    done   next    exchange
    F      F       send forward; receive forward         warm-up
    F      B       send forward; receive backward        steady: both with the next stage
    B      F       send backward; receive forward        steady: both with the previous stage
    B      B       send backward; receive backward       cool-down
    any    none    send, and wait                        the pipeline is empty

A receive is waited for when the next action needs it, a send before the next message in that direction. So a stage that makes a
deferred update need not be at the same place as its neighbour: one message may be in flight meanwhile.

After the last action of a run comes an update, where Megatron may wait for the device and the other ranks. A message that the
neighbour matches only after its own update must not be posted before: such an exchange is postponed until the next run begins.

The communicator's functions for both directions are blocking, so messages are posted with the operations below it, each by
itself. NCCL has one stream for all messages of two ranks in a group, in both directions. With one hardware queue a message after
an unmatched one stalls compute and recomputations. So gradients use the group of all ranks, which has another stream (Megatron
does the same if a pipeline has two stages).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_lynx.schedule.schedule import Action

OUTPUTS = ("send_next", "recv_prev")
GRADIENTS = ("send_prev", "recv_next")
"""Megatron's names for the messages of either kind."""

Tensors = list[torch.Tensor | None]
"""One exchanged tensor, in a list as Megatron's schedules keep it; None at the ends of the pipeline."""


class Exchange:
    """One stage's side of the exchanges. Every message has the same `shape`."""

    def __init__(self, group: Any, config: Any, shape: tuple[int, ...]) -> None:
        self.first, self.last = group.rank() == 0, group.rank() == group.size() - 1
        self._neighbours = P2PCommunicator(pp_group=group, config=config)
        self._config, self._shape, self._group = config, shape, group
        self._group_of_gradients = group if group.size() == 2 else dist.group.WORLD  # with two stages Megatron makes two streams
        self._coming: torch.Tensor | None = None
        self._work: dict[str, tuple[Any, torch.Tensor]] = {}
        """Messages in flight, by Megatron's name for the direction, with their tensors."""
        self._begun = False
        self._postponed: tuple[Action, Tensors, Action | None] | None = None

    def take(self, action: Action) -> Tensors:
        """Return the input of a forward, or the gradient of a backward's output."""
        if not self._begun:
            self._receive(action)
        for name in ("recv_prev", "recv_next"):
            self._wait_for(name)
        coming, self._coming, self._begun = self._coming, None, False
        return [coming]

    def pass_on(self, done: Action, made: Tensors, following: Action | None) -> None:
        """Send the result of `done`, and receive the input of `following`."""
        direction, at_end = ("send_next", self.last) if done.kind == "F" else ("send_prev", self.first)
        self._wait_for(direction)
        if not at_end and made[0] is not None:
            self._post(direction, made[0].detach())
        if following is not None:
            self._receive(following)
            return
        for name in list(self._work):
            self._wait_for(name)

    def postpone(self, done: Action, made: Tensors, following: Action | None) -> None:
        """Pass on when the next run begins."""
        self._postponed = done, made, following

    def begin_postponed(self) -> None:
        """Pass on what the run before postponed."""
        postponed, self._postponed = self._postponed, None
        if postponed is not None:
            self.pass_on(*postponed)

    def _receive(self, following: Action) -> None:
        """Post the receive that an action needs, if a stage sends it."""
        self._begun = True
        name, at_end = ("recv_prev", self.first) if following.kind == "F" else ("recv_next", self.last)
        if at_end:
            return
        device, dtype = torch.cuda.current_device(), self._config.pipeline_dtype
        self._coming = torch.empty(self._shape, requires_grad=True, device=device, dtype=dtype)
        self._post(name, self._coming)

    def _post(self, name: str, message: torch.Tensor) -> None:
        works = p2p_communication._p2p_ops(
            **{f"tensor_{other}": message if other == name else None for other in (*OUTPUTS, *GRADIENTS)},
            group=self._group if name in OUTPUTS else self._group_of_gradients,
            prev_pipeline_rank=self._neighbours.prev_rank,
            next_pipeline_rank=self._neighbours.next_rank,
        )
        self._work[name] = works[name], message

    def _wait_for(self, name: str) -> None:
        if name in self._work:
            work, _ = self._work.pop(name)
            work.wait()
