"""Writes what a plan does in each step into the TensorBoard and W&B logs that a launch writes anyway.

    step k      every rank: what its engine counted ──the largest, over gloo, not waited for──> the rank that logs
    next log    what came of step k is there by now, and is written for step k
    the end     so is what is left; into W&B before Megatron's loop, which exits when its time is over, ends the run there

Megatron logs on its last rank, a stage that offloads nothing in plain 1F1B, so the figures of all ranks are reduced to it.
Nothing waits for a device: seconds of events that it has not reached when a step ends are counted in the next step. Without gloo
the rank that logs tells of itself alone, and rank 0 says so.
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
"""Stands for what a rank does not know: less than any figure, so that of all ranks one that knows counts."""
GLOO = ("enable_gloo_process_groups", "use_gloo_process_groups")
"""What Megatron's --disable-gloo-process-groups switches off: until 0.16, and from 0.17 on."""


@dataclass
class _Pending:
    """Figures on their way to the rank that logs."""

    step: int
    names: Sequence[str]
    values: torch.Tensor
    work: Any


class Metrics:
    """Logs the counts of one training loop. All ranks must make it together.

    Args:
        args: Megatron's.
        tensorboard: its SummaryWriter, None on ranks that do not log.
        wandb: the module after its `init`, likewise.
    """

    def __init__(self, args: Any, tensorboard: Any = None, wandb: Any = None) -> None:
        self.total = Figures()
        """The counts of all steps."""
        self._args = args
        self._tensorboard, self._wandb = tensorboard, wandb
        self._wanted = bool(getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None))
        self._group = _group_of_all(args) if self._wanted else None
        self._pending: _Pending | None = None

    def step_ends(self, engine: Engine, named: Callable[[Figures], Mapping[str, float | None]] = logged) -> Figures:
        """Take what the engine counted in this step, and return it. It is logged as often as Megatron logs, as `named`, which has
        the same names on all ranks; None is not known."""
        counts = engine.take_counts(exact=False)
        self.total = self.total + counts
        step = self._args.curr_iteration + 1
        if not self._wanted or step % self._args.tensorboard_log_interval:
            return counts
        self._write()
        found = {name: UNKNOWN if value is None else value for name, value in named(counts).items()}
        values = torch.tensor(list(found.values()), dtype=torch.float64, device="cpu")
        work = None
        if self._group is not None:
            last = dist.get_world_size() - 1
            work = dist.reduce(values, dst=last, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = _Pending(step, list(found), values, work)
        return counts

    def close(self) -> None:
        """Write what is left."""
        self._write()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    @contextmanager
    def written_before_wandb_ends(self) -> Iterator[None]:
        """Inside, whoever ends W&B's run, as Megatron does before its loop exits, has what is left written first."""
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
    """A group of all ranks that the host talks in; None for one rank, and where there is no gloo, which is said."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group, missing = _made(args)
    missing = next((why for why in of_all_ranks(missing) if why is not None), None)
    if missing is None:
        return group
    if group is not None:
        dist.destroy_process_group(group)
    alone = (
        f"{PREFIX} figures in logs are those of rank {dist.get_world_size() - 1} alone, which writes them, not the most of all"
    )
    on_rank_0(f"megatron-lynx: {missing}: {alone}")
    return None


def _made(args: Any) -> tuple[Any, str | None]:
    """The group, or why there is none."""
    if not all(getattr(args, name, True) for name in GLOO):
        return None, "--disable-gloo-process-groups"
    if not dist.is_gloo_available():
        return None, "this PyTorch has no gloo"
    try:
        return dist.new_group(backend="gloo"), None
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        return None, f"no group over gloo ({first})"
