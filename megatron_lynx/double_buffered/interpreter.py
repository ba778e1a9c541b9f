"""Runs an order given as data, with Megatron's own functions: one action, then the exchange with the neighbours before the next.

    take the action's input ──> forward_step or backward_step ──> send its result, receive the next one's input

    done   next    exchange
    F      F       send forward; receive forward         warm-up
    F      B       send forward; receive backward        steady: both with the next stage
    B      F       send backward; receive forward        steady: both with the previous stage
    B      B       send backward; receive backward       cool-down
    any    none    send, and wait                        the pipeline is empty

A receive is waited for when the next action needs it, a send before the next message in that direction. A run may end in the
middle of an order: the exchange before its next action is begun, micro-batches in flight stay here, and the next run continues.
So every stage has sent the messages that others wait for before an update, which may be a barrier. A message that the neighbour
matches only after its own update is posted in the next run.

Functions of Megatron's schedules are looked up at each call, so that hooks on them see these calls. NCCL has one stream for all
messages of two ranks in a group, where a message after an unmatched one would stall; so gradients use the group of all ranks.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config, get_model_type

from megatron_lynx.schedule.schedule import Action


class Interpreter:
    """One stage of a pipeline, with the micro-batches in flight and the received input of the next action.

    `microbatches`: of one batch: losses are divided by it. `before`: called with each action before it; with a batch's last
    backward again before its gradient is reduced.
    """

    def __init__(
        self,
        chunk: torch.nn.Module,
        *,
        microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        before: Callable[[Action], None] = lambda _: None,
    ) -> None:
        self.chunk = chunk
        self.config: Any = get_model_config(chunk)
        self.microbatches = microbatches
        self._before = before
        group = parallel_state.get_pipeline_model_parallel_group()
        self.pipeline, self.stage = group.size(), group.rank()
        self._context_parallel: int = parallel_state.get_context_parallel_world_size()
        (shape,) = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=None,
            config=self.config,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            cp_group=parallel_state.get_context_parallel_group(),
        )
        self._exchange = Exchange(group, self.config, shape)
        model_type = {"model_type": get_model_type(chunk)}  # an argument until 0.17
        self._told_backward = model_type if "model_type" in inspect.signature(schedules.backward_step).parameters else {}
        self._in_flight: dict[int, tuple[Tensors, Tensors]] = {}
        self._losses: defaultdict[int, list[Any]] = defaultdict(list)
        self._tokens: defaultdict[int, torch.Tensor] = defaultdict(lambda: torch.zeros([], dtype=torch.int, device="cuda"))

    @property
    def in_flight(self) -> tuple[int, ...]:
        return tuple(self._in_flight)

    def run(
        self,
        actions: Sequence[Action],
        forward_step_func: Callable[..., Any],
        batches: Any,
        *,
        batch: int = 0,
        then: Action | None = None,
        postpones: bool = False,
    ) -> list[Any]:
        """Run `actions`; then reduce the gradient of `batch`, as Megatron's schedules do at their end.

        Args:
            batches: the data of `forward_step_func`; forwards of the next batch that run ahead read from it too.
            batch: its last backward is among `actions`. Its micro-batches are numbered from `batch * microbatches`.
            then: the first action of the next run; None: nothing is in flight afterwards.
            postpones: the exchange before `then` is begun by the next run. The last of `actions` is a backward then.

        Returns reports of the loss function, by micro-batch of `batch`, on the last stage; elsewhere an empty list.
        """
        last_backward = Action((batch + 1) * self.microbatches - 1, "B")
        overlaps = self.config.grad_sync_func is None or self.stage == 0
        no_sync = self.config.no_sync_func or nullcontext
        with self._timed():
            self._exchange.pass_on_postponed()
            for action, following in pairwise([*actions, then]):
                assert action is not None
                with nullcontext() if action == last_backward and overlaps else no_sync():
                    self._before(action)
                    if action.kind == "F":
                        self._forward(action, following, forward_step_func, batches)
                    else:
                        self._backward(action, following, postponed=postpones and action == actions[-1])
            self._before(last_backward)
            self._reduce_gradients(self._tokens.pop(batch, None), overlaps)
        return self._losses.pop(batch, [])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        timers = self.config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=self.config.barrier_with_L1_time)
        yield
        if timers is not None:
            timers("forward-backward").stop()

    def _forward(self, action: Action, following: Action | None, forward_step_func: Callable[..., Any], batches: Any) -> None:
        batch = action.micro_batch // self.microbatches
        inputs = self._exchange.take(action)
        outputs, tokens = schedules.forward_step(
            forward_step_func,
            batches,
            self.chunk,
            self.microbatches,
            inputs,
            self._losses[batch],
            self.config,
            cp_group_size=self._context_parallel,
            current_microbatch=action.micro_batch % self.microbatches,
            is_last_stage=self._exchange.last,
        )
        self._exchange.pass_on(action, outputs, following)
        schedules.deallocate_output_tensor(outputs[0], self.config.deallocate_pipeline_outputs)
        self._in_flight[action.micro_batch] = inputs, outputs
        self._tokens[batch] += tokens

    def _backward(self, action: Action, following: Action | None, *, postponed: bool) -> None:
        gradients = self._exchange.take(action)
        inputs, outputs = self._in_flight.pop(action.micro_batch)
        input_gradients = schedules.backward_step(inputs, outputs, gradients, config=self.config, **self._told_backward)
        if postponed:
            self._exchange.postponed = action, input_gradients, following
        else:
            self._exchange.pass_on(action, input_gradients, following)

    def _reduce_gradients(self, tokens: torch.Tensor | None, begun: bool) -> None:
        """Reduce over replicas, tensor-parallel ranks and tied embeddings. `begun`: DDP has begun, and only ends it here."""
        config = self.config
        if not begun:
            config.grad_sync_func(self.chunk.parameters())
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func([self.chunk], tokens if config.calculate_per_token_loss else None)


OUTPUTS = ("send_next", "recv_prev")
GRADIENTS = ("send_prev", "recv_next")
"""Megatron's names for the messages of either kind."""

Tensors = list[torch.Tensor | None]
"""One exchanged tensor, in a list as Megatron's schedules keep it; None at the ends of the pipeline."""


class Exchange:
    """Every message has the same `shape`."""

    def __init__(self, group: Any, config: Any, shape: tuple[int, ...]) -> None:
        self.first, self.last = group.rank() == 0, group.rank() == group.size() - 1
        self._neighbours = P2PCommunicator(pp_group=group, config=config)
        self._config, self._shape, self._group = config, shape, group
        self._group_of_gradients = group if group.size() == 2 else dist.group.WORLD  # with two stages Megatron makes two streams
        self._coming: torch.Tensor | None = None
        self._work: dict[str, tuple[Any, torch.Tensor]] = {}
        """Messages in flight, by Megatron's name for the direction, with their tensors."""
        self._begun = False
        self.postponed: tuple[Action, Tensors, Action | None] | None = None
        """Arguments of `pass_on`, for the begin of the next run."""

    def take(self, action: Action) -> Tensors:
        if not self._begun:
            self._receive(action)
        for name in ("recv_prev", "recv_next"):
            self._wait_for(name)
        coming, self._coming, self._begun = self._coming, None, False
        return [coming]

    def pass_on(self, done: Action, made: Tensors, following: Action | None) -> None:
        direction, at_end = ("send_next", self.last) if done.kind == "F" else ("send_prev", self.first)
        self._wait_for(direction)
        if not at_end and made[0] is not None:
            self._post(direction, made[0].detach())
        if following is not None:
            self._receive(following)
            return
        for name in list(self._work):
            self._wait_for(name)

    def pass_on_postponed(self) -> None:
        postponed, self.postponed = self.postponed, None
        if postponed is not None:
            self.pass_on(*postponed)

    def _receive(self, following: Action) -> None:
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
