"""Runs an order given as data, with Megatron's own functions: one action, then the exchange that leads to the next.

    done   next    exchange with the neighbours                     as in Megatron's 1F1B
    F      F       send forward; receive forward                    warm-up
    F      B       send forward and receive backward, together      steady: both with the stage behind
    B      F       send backward and receive forward, together      steady: both with the stage before
    B      B       send backward; receive backward                  cool-down
    any    none    send                                             the pipeline is empty

A run may end in the middle of an order: the exchange that leads to its next action is made, what is in flight stays here, and the
next run goes on. So every stage has sent what the others wait for before it turns to an update, which may be a barrier.

Every function of Megatron's schedules is looked up when it is called, so that hooks on them see these calls too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config, get_model_type

from megatron_lynx.schedule.action import Action

Tensors = list[torch.Tensor | None]
"""One tensor that stages exchange, in a list as Megatron's schedules keep it; none at the ends of the pipeline."""


class Interpreter:
    """One stage of a pipeline. Between runs it holds the micro-batches in flight, and what was received for the next action.

    Args:
        chunk: this rank's model, wrapped or not.
        microbatches: of one batch: losses are divided by it.
        seq_length: tokens of a sequence.
        micro_batch_size: sequences of a micro-batch.
        before: called before each action, with it.
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
        self._neighbours = P2PCommunicator(pp_group=group, config=self.config)
        self.pipeline, self.stage = group.size(), group.rank()
        self._first, self._last = self.stage == 0, self.stage == self.pipeline - 1
        self._context_parallel: int = parallel_state.get_context_parallel_world_size()
        self._shapes: list[tuple[int, ...]] = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=None,
            config=self.config,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            cp_group=parallel_state.get_context_parallel_group(),
        )
        self._in_flight: dict[int, tuple[Tensors, Tensors]] = {}
        self._received: Tensors | None = None

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches whose backward is still to come."""
        return tuple(self._in_flight)

    def run(
        self, actions: Sequence[Action], forward_step_func: Callable[..., Any], batches: Any, then: Action | None = None
    ) -> list[Any]:
        """Run `actions`; reduce the gradients that their backwards left, as Megatron's schedules do at their end.

        Args:
            actions: forwards and backwards of this stage; all the backwards of one batch, and no others.
            forward_step_func: as Megatron's schedules take it.
            batches: what `forward_step_func` reads from; forwards of the next batch that run ahead read from it too.
            then: the action that a later run begins with; none: nothing is in flight afterwards.

        Returns:
            What the loss function reported, by micro-batch: on the last stage, elsewhere nothing.
        """
        losses: list[Any] = []
        tokens = torch.zeros([], dtype=torch.int, device="cuda")
        last_backward = next((action for action in reversed(actions) if action.kind == "B"), None)
        with ExitStack() as no_reduction:
            no_reduction.enter_context((self.config.no_sync_func or nullcontext)())
            if self._received is None and actions:
                self._received = self._receive(actions[0])
            for action, following in pairwise([*actions, then]):
                assert action is not None
                if action == last_backward and (self.config.grad_sync_func is None or self._first):
                    no_reduction.close()
                self._before(action)
                if action.kind == "F":
                    tokens += self._forward(action, following, forward_step_func, batches, losses)
                else:
                    self._backward(action, following)
        self._reduce_gradients(tokens)
        return losses

    def _forward(
        self, action: Action, following: Action | None, forward_step_func: Callable[..., Any], batches: Any, losses: list[Any]
    ) -> torch.Tensor:
        """One forward. How many tokens it counted (zero on all stages but the last)."""
        inputs = self._take_received()
        outputs, tokens = schedules.forward_step(
            forward_step_func,
            batches,
            self.chunk,
            self.microbatches,
            inputs,
            losses,
            self.config,
            cp_group_size=self._context_parallel,
            current_microbatch=action.micro_batch % self.microbatches,
            is_last_stage=self._last,
        )
        self._exchange(action, outputs, following)
        schedules.deallocate_output_tensor(outputs[0], self.config.deallocate_pipeline_outputs)
        self._in_flight[action.micro_batch] = inputs, outputs
        return tokens  # type: ignore[no-any-return]

    def _backward(self, action: Action, following: Action | None) -> None:
        gradients = self._take_received()
        inputs, outputs = self._in_flight.pop(action.micro_batch)
        model_type = get_model_type(self.chunk)
        input_gradients = schedules.backward_step(inputs, outputs, gradients, model_type, self.config)
        self._exchange(action, input_gradients, following)

    def _exchange(self, done: Action, made: Tensors, following: Action | None) -> None:
        """Send what `done` made, and receive what `following` needs."""
        neighbours, shapes = self._neighbours, self._shapes
        if following is not None and done.kind != following.kind:
            if done.kind == "F":
                self._received = neighbours.send_forward_recv_backward(made, shapes, self._last)
            else:
                self._received = neighbours.send_backward_recv_forward(made, shapes, self._first)
            return
        if done.kind == "F":
            neighbours.send_forward(made, self._last)
        else:
            neighbours.send_backward(made, self._first)
        self._received = None if following is None else self._receive(following)

    def _receive(self, action: Action) -> Tensors:
        if action.kind == "F":
            return self._neighbours.recv_forward(self._shapes, self._first)  # type: ignore[no-any-return]
        return self._neighbours.recv_backward(self._shapes, self._last)  # type: ignore[no-any-return]

    def _take_received(self) -> Tensors:
        received, self._received = self._received, None
        assert received is not None
        return received

    def _reduce_gradients(self, tokens: torch.Tensor) -> None:
        """What is left of a batch's gradient: over replicas, tensor-parallel ranks, and both ends of tied embeddings."""
        config = self.config
        if config.grad_sync_func is not None and not self._first:
            config.grad_sync_func(self.chunk.parameters())
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func([self.chunk], tokens if config.calculate_per_token_loss else None)
