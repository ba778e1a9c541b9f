"""Writes the figures of each step into TensorBoard and W&B.

    step k      all ranks: the maximum of their counts is reduced over gloo, asynchronously, to the rank that logs
    next log    the result of step k has arrived, and is written for step k
    the end     the last result is written; for W&B before Megatron finishes its run

Megatron logs on its last rank, a stage that offloads nothing in plain 1F1B, so figures of all ranks are reduced to it. The host
never waits for a device: seconds whose events are not done when a step ends count in the next step. Without gloo only the logging
rank's figures are written, and rank 0 says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from megatron_lynx.apply.hook import Claim, Hook
from megatron_lynx.apply.live_run import of_all_ranks
from megatron_lynx.figures import Figures, logged
from megatron_lynx.launch.ending import on_rank_0
from megatron_lynx.runtime.engine import Engine

PREFIX = "lynx/"
UNKNOWN = -1.0
"""Stands for an unknown figure in the reduction: less than any figure, so the maximum ignores it."""
GLOO = ("enable_gloo_process_groups", "use_gloo_process_groups")
"""Megatron's arguments that --disable-gloo-process-groups switches off: until 0.16, and from 0.17 on."""


@dataclass
class _Pending:
    step: int
    names: Sequence[str]
    values: torch.Tensor
    work: Any


class Metrics:
    """Logs the counts of one training loop. Collective. `tensorboard` and `wandb` are None on ranks that do not log."""

    def __init__(self, args: Any, tensorboard: Any = None, wandb: Any = None) -> None:
        self.total = Figures()
        self._args = args
        self._tensorboard, self._wandb = tensorboard, wandb
        self._wanted = bool(getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None))
        self._group = _group_of_all(args) if self._wanted else None
        self._pending: _Pending | None = None

    def step_ends(self, engine: Engine, named: Callable[[Figures], Mapping[str, float | None]] = logged) -> Figures:
        """Take, log and return the engine's counts of this step. `named` returns the logged figures, the same on all ranks."""
        counts = engine.take_counts(exact=False)
        self.total = self.total + counts
        step = self._args.curr_iteration + 1
        if not self._wanted or step % self._args.tensorboard_log_interval:
            return counts
        self._write()
        figures = {name: UNKNOWN if value is None else value for name, value in named(counts).items()}
        values = torch.tensor(list(figures.values()), dtype=torch.float64, device="cpu")
        work = None
        if self._group is not None:
            last = dist.get_world_size() - 1
            work = dist.reduce(values, dst=last, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = _Pending(step, list(figures), values, work)
        return counts

    def close(self) -> None:
        self._write()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    @contextmanager
    def written_before_wandb_ends(self) -> Iterator[None]:
        """Write the last figures before W&B's run is finished inside: Megatron finishes it before its loop exits."""
        if self._wandb is None:
            yield
            return
        hook = Hook(Claim(self._wandb, "finish", self._written_before, "ends a run of W&B"))
        try:
            yield
        finally:
            if hook.active:
                hook.restore()

    def _written_before(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(finish)
        def written_and_finished(*args: Any, **kwargs: Any) -> Any:
            self._write()
            return finish(*args, **kwargs)

        return written_and_finished

    def _write(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.work is not None:
            pending.work.wait()
        logged = zip(pending.names, pending.values.tolist(), strict=True)
        named = {f"{PREFIX}{name}": value for name, value in logged if value != UNKNOWN}
        if self._tensorboard is not None:
            for name, value in named.items():
                self._tensorboard.add_scalar(name, value, pending.step)
        if self._wandb is not None:
            self._wandb.log(named, pending.step)


def _group_of_all(args: Any) -> Any:
    """A gloo group of all ranks; None for one rank, and, with a message, if gloo is missing."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group: Any = None
    missing = "--disable-gloo-process-groups"
    if all(getattr(args, name, True) for name in GLOO):
        missing = "" if dist.is_gloo_available() else "this PyTorch has no gloo"
    if not missing:
        try:
            group = dist.new_group(backend="gloo")
        except RuntimeError as error:
            missing = f"no group over gloo ({str(error).partition(chr(10))[0]})"
    missing = next(filter(None, of_all_ranks(missing)), "")
    if not missing:
        return group
    if group is not None:
        dist.destroy_process_group(group)
    alone = (
        f"{PREFIX} figures in logs are those of rank {dist.get_world_size() - 1} alone, which writes them, not the most of all"
    )
    on_rank_0(f"megatron-lynx: {missing}: {alone}")
    return None
