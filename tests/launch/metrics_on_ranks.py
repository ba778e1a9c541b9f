"""What the tests of metrics run on ranks."""

from __future__ import annotations

import contextlib
import io
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest import mock

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


class Logged(NamedTuple):
    recomputations: float
    groups: int
    """That were made for it, over gloo."""
    said: str


def logged(rank: int, args: dict[str, Any], gloo: Literal["here", "missing", "broken"]) -> Logged:
    """What this rank would log of a step in which rank 0 recomputations twice and others once."""
    from megatron_lynx.launch.metrics import Metrics

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    scalars: dict[str, float] = {}
    board = SimpleNamespace(add_scalar=lambda name, value, step: scalars.update({name: value}))
    launch = SimpleNamespace(tensorboard_dir="logs", tensorboard_log_interval=1, curr_iteration=0, **args)
    said = io.StringIO()
    with mock.patch.object(dist, "new_group", side_effect=_new_group(gloo)) as new_group, contextlib.redirect_stderr(said):
        with mock.patch.object(dist, "is_gloo_available", return_value=gloo != "missing"):
            metrics = Metrics(launch, board)
        metrics.step_ends(Counted(before=1 if rank == 0 else 0))
        metrics.close()
    return Logged(scalars["lynx/recomputations_hidden"], new_group.call_count, said.getvalue())


def _new_group(gloo: str) -> Any:
    return RuntimeError("no interface\nwhere: somewhere in gloo") if gloo == "broken" else dist.new_group
