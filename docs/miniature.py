"""Overlapped recomputation in one file: two linears and one slow collective.

While gradients wait for a tensor-parallel all-reduce, the GPU has nothing to do. That is the time in which activations that were
dropped in forward can be computed again for nothing. This file does so for one half of a layer; the package does it for a model.

    forward     x ──[1] lower linear, GELU ──────────────> a ──[2] upper linear ──> loss
                    saved for backward: x, h = lower(x)        saved: a
                    h is dropped: autograd holds a Handle

    backward    [3] gradient of a ──all-reduce──────────────────────────> [6] gradient of h, of lower's weight
                       issued      │ [4] h is computed again │ waited for      [5] the Handle hands h over, once

Nothing here depends on a clock (rule R1 in architecture.md): h is computed again in the wait because the window says so, and if
no window did, [5] would compute it when autograd asks. That is slower, never wrong (R5). Recomputation must not communicate (R2),
and after backward nothing is held (R8). Run it with `python docs/miniature.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import gelu


@dataclass
class Frame:
    """[1] What is remembered of one call: its code, its input, and which of its saved tensors were dropped."""

    code: Callable[[Tensor], Tensor]
    input: Tensor
    kept: frozenset[int]
    """Storages that stay anyway: the input's and those of parameters, which backward must find as they are (R11)."""
    log: list[str]
    dropped: int = 0
    regenerated: dict[int, Tensor] = field(default_factory=dict)

    def record(self) -> Tensor:
        """Run the code, and let go of what it saves for backward."""
        with saved_tensors_hooks(self._drop, _hand_over):
            return self.code(self.input)

    def _drop(self, saved: Tensor) -> Handle | Tensor:
        if saved.untyped_storage().data_ptr() in self.kept:
            return saved
        self.dropped += 1
        self.log.append("dropped")
        return Handle(self, self.dropped)

    def recompute(self, when: str) -> None:
        """[4] The same code on the same input saves the same tensors, in the same order."""
        if self.regenerated or not self.dropped:
            return
        self.log.append(f"recomputed {when}")
        order = iter(range(1, self.dropped + 1))

        def keep(saved: Tensor) -> None:
            if saved.untyped_storage().data_ptr() not in self.kept:
                self.regenerated[next(order)] = saved.detach()

        with torch.enable_grad(), saved_tensors_hooks(keep, _never):
            self.code(self.input.detach().requires_grad_())


@dataclass(frozen=True)
class Handle:
    """What autograd holds instead of a tensor that was dropped: the frame, and which one of its tensors."""

    frame: Frame
    number: int


def _hand_over(saved: Handle | Tensor) -> Tensor:
    """[5] Autograd asks for a tensor. It gets a dropped one once, and the frame forgets it."""
    if isinstance(saved, Tensor):
        return saved
    saved.frame.recompute("on demand")
    saved.frame.log.append("handed over")
    return saved.frame.regenerated.pop(saved.number)


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a recomputation has no backward")


class _SumOfGradients(torch.autograd.Function):
    """[3] Ranks share `a`; each computes a part of its gradient, and the parts are added up: a wait, and so a window."""

    @staticmethod
    def forward(ctx: Any, shared: Tensor, window: Callable[[], None], log: list[str]) -> Tensor:
        ctx.window, ctx.log = window, log
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient.clone()
        work = dist.all_reduce(total, async_op=True)
        ctx.log.append("issued")
        ctx.window()
        work.wait()
        ctx.log.append("waited for")
        return total, None, None


def step(lower: nn.Linear, upper: nn.Linear, x: Tensor, *, drop: bool, window: bool, log: list[str]) -> Tensor:
    """One forward and backward; gradients are left in the parameters. The loss is returned.

    `x`: [tokens, width]. `drop`: let go of what [1] saves. `window`: compute it again in the wait; else on demand.
    """
    kept = frozenset(tensor.untyped_storage().data_ptr() for tensor in (x, *lower.parameters()))
    frame = Frame(lambda given: gelu(lower(given)), x, kept, log)
    a = frame.record() if drop else frame.code(x)
    in_wait = (lambda: frame.recompute("in the wait")) if window else (lambda: None)
    loss: Tensor = upper(_SumOfGradients.apply(a, in_wait, log)).square().mean()
    loss.backward()
    return loss.detach()


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    linears, given = (nn.Linear(256, 1024), nn.Linear(1024, 256)), torch.randn(64, 256)
    for drops, in_window in ((False, False), (True, False), (True, True)):
        said: list[str] = []
        print(f"loss {step(*linears, given, drop=drops, window=in_window, log=said):.6f}   {' > '.join(said)}")
    dist.destroy_process_group()
