"""What the tests of metrics run on ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megatron_lynx.figures import Figures


class Counted:
    """An engine that counts one thing more in each step."""

    def __init__(self, before: int = 0) -> None:
        self.steps = before
        self.exact: set[bool] = set()

    def take_counts(self, *, exact: bool = True) -> Figures:
        self.steps += 1
        self.exact.add(exact)
        return Figures(in_windows=self.steps, host_bytes=7, offloaded_bytes=100, exposed_copy_s=0.5)


def logged(rank: int) -> float:
    """Recomputations that this rank would log of a step in which rank 0 recomputes twice and others once."""
    from megatron_lynx.launch.reporter import Metrics

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    scalars: dict[str, float] = {}
    board: Any = SimpleNamespace(add_scalar=lambda name, value, step: scalars.update({name: value}))
    launch = SimpleNamespace(tensorboard_dir="logs", tensorboard_log_interval=1, curr_iteration=0)
    metrics = Metrics(launch, board)
    metrics.step_ends(Counted(before=1 if rank == 0 else 0))
    metrics.write()
    return scalars["lynx/recomputations_hidden"]
