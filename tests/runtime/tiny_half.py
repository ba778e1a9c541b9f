"""An MLP half of plain torch modules, whose sites and collectives are reported as hooks on Megatron would report them.

hidden ─> [pre_mlp_layernorm] ─> [linear_fc1] ─> gelu ─> [linear_fc2] ─> dropout, + hidden
segment    1             2        3          4            5          6
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.anatomy import MLP
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.frame import Frame, HalfPolicy, MicroBatch
from megatron_lynx.runtime.recompute import Recomputer
from megatron_lynx.runtime.record import Recorder
from megatron_lynx.runtime.saved import detached
from megatron_lynx.runtime.site import Site, SiteCall
from megatron_lynx.runtime.surroundings import RandomSource

NORM, FC1, ACTIVATION, FC2, RESIDUAL = MLP.names
ROWS, WIDTH = 3, 4
FLOAT_BYTES = 4


class _Linear(torch.autograd.Function):
    """As Megatron's: it saves what it reads and the parameter itself, and its backward looks at the parameter's attributes."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, used: list[Any]) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.used = used
        return given @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        given, weight = ctx.saved_tensors
        ctx.used.append(weight)
        return gradient @ weight.t(), given.t() @ gradient, None


class Linear(torch.nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(columns, rows))
        self.used: list[Any] = []
        """What each backward found in place of the weight."""

    def forward(self, given: Tensor) -> Tensor:
        return _Linear.apply(given, self.weight, self.used)  # type: ignore[no-any-return]


class TinyHalf(torch.nn.Module):
    """`report` gets each site's call, and makes it or does not; by default all are made."""

    def __init__(self, report: Callable[[SiteCall], Any] | None = None) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = torch.nn.LayerNorm(WIDTH), Linear(WIDTH, 2 * WIDTH), Linear(2 * WIDTH, WIDTH)
        self.report = report or (lambda call: call())
        self.ran: list[str] = []
        """Sites whose modules ran."""
        self.kept_dropout = 0.0
        """Of the row-parallel site, which is always kept."""

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self._site(NORM, self.norm, hidden)
        wide = torch.nn.functional.gelu(self._site(FC1, self.fc1, normed))
        narrow = self._site(FC2, self.fc2, wide)
        return torch.nn.functional.dropout(narrow, 0.5) + hidden

    def _site(self, name: str, module: torch.nn.Module, given: Tensor) -> Tensor:
        def run(given: Tensor) -> Any:
            self.ran.append(name)
            made = module(given)
            return torch.nn.functional.dropout(made, self.kept_dropout) if name == FC2 and self.kept_dropout else made

        return self.report(SiteCall(Site(name, module, run), (given,), {}))  # type: ignore[no-any-return]

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]

    def forget(self) -> None:
        """As before the first call."""
        self.zero_grad()
        self.ran.clear()


def made(rows: int = ROWS) -> tuple[TinyHalf, Tensor]:
    """A half and what goes into it, always the same."""
    torch.manual_seed(1)
    return TinyHalf(), torch.randn(rows, WIDTH, requires_grad=True)


def reporting_to(engine: Engine) -> Callable[[SiteCall], Any]:
    """What the hooks on sites do."""

    def report(call: SiteCall) -> Any:
        return engine.reported(call.site)(*call.args, **call.kwargs)

    return report


def policy(recompute: Iterable[str] = (), **more: Any) -> HalfPolicy:
    return HalfPolicy(layer=more.pop("layer", 1), section=MLP, recompute=frozenset(recompute), **more)


def recorded(half: TinyHalf, hidden: Tensor, recompute: Iterable[str]) -> tuple[Frame, Tensor]:
    """The frame of one call, and what the call returned. Backward recomputations on demand."""
    inputs: Any = ((detached(hidden),), {})

    def on_demand(frame: Frame) -> None:
        recomputed(half, frame)

    random = RandomSource().capture()
    frame = Frame(policy(recompute), MicroBatch(0), half.forward, on_demand, inputs=inputs, draws=True, random=random)
    recorder = Recorder(frame, RandomSource())
    half.report = recorder.site
    output = recorder.run((hidden,), {})
    half.ran.clear()
    return frame, output


def recomputed(half: TinyHalf, frame: Frame, until: str | None = None) -> Tensor | None:
    """What the recomputation up to `until` reached."""
    recomputer = Recomputer(frame, RandomSource(), until)
    half.report = recomputer.site
    recomputer.run()
    return recomputer.argument
