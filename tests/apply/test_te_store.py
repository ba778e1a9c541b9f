"""What takes the place of Transformer Engine's `WeightGradStore`: when it computes, what it catches up with, and what it counts.

Transformer Engine itself is not needed here: its linears hand over operands and a function.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from megatron_lynx.anatomy import MLP
from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.apply.hooks.weight_gradients import LinearOf, Store
from megatron_lynx.figures import Figures
from megatron_lynx.runtime.device import Trace
from megatron_lynx.runtime.frame import ChunkPolicy, HalfPolicy
from megatron_lynx.runtime.surroundings import Surroundings
from megatron_lynx.runtime.weight_gradients import WeightGradients
from tests.runtime.devices import CPU

FC1 = LinearOf(1, "linear_fc1", "column_parallel")


class Backward:
    """A linear whose backward runs in one micro-batch after the other, with gradients reduced while the last one's does."""

    def __init__(self) -> None:
        policy = HalfPolicy(layer=1, section=MLP, deferred={FC1.item: (RECV_BACKWARD,)})
        self._frame = SimpleNamespace(policy=policy, micro_batch=SimpleNamespace(number=0))
        self._ledger = SimpleNamespace(entered=self._frame, running=object(), completes_gradients=False, drains=False)
        self.progress: Any = SimpleNamespace(trace=Trace(CPU), counts=Figures(), in_backward_of=self._frame, ledger=self._ledger)
        deferral = ChunkPolicy(most_delayed_bytes=10**6)
        self.gradients = WeightGradients(self.progress, [deferral], Surroundings(()), reduced_in_backward=lambda: True)
        module = SimpleNamespace(apply_bias=False, gemm_bias_unfused_add=False)
        self.store = Store(None, self.gradients, FC1, module)
        self.order: list[int] = []

    def of(self, micro_batch: int, *, last: bool = False) -> None:
        """As a linear's backward asks its store."""
        self._frame.micro_batch.number, self._ledger.completes_gradients = micro_batch, last
        compute = partial(self._compute, micro_batch)
        if self.store.delay_wgrad_compute():
            self.store.put([torch.ones(3, 4), torch.ones(3, 5)], compute)
        else:
            compute()

    def _compute(self, micro_batch: int, *operands: Any) -> tuple[None, None]:
        self.order.append(micro_batch)
        return None, None


def test_what_is_pending_is_computed_before_the_linears_last_gradient() -> None:
    """In cool-down no forward takes it. Behind the last gradient it would be added in another order, and after the reduction
    that the gradient starts: sixteen gradients of a model came out wrong."""
    backward = Backward()
    for micro_batch in (0, 1):
        backward.of(micro_batch)
    assert backward.order == []
    backward.of(2, last=True)
    assert backward.order == [0, 1, 2]


def test_operands_count_until_a_wait_computes_with_them() -> None:
    """The input, and the gradient of the output."""
    backward = Backward()
    backward.of(0)
    assert backward.gradients.bytes == (3 * 4 + 3 * 5) * 4
    backward.gradients.run(FC1.linear, "fwd.mlp.0@1")
    assert (backward.gradients.bytes, backward.order) == (0, [0])


def test_a_forward_decides_nothing() -> None:
    """Since 2.15 the store reaches backward only if forward, which asks too, is told yes. That computes nothing pending."""
    backward = Backward()
    backward.of(0)
    backward.progress.in_backward_of = None
    assert backward.store.delay_wgrad_compute()
    assert backward.order == []
