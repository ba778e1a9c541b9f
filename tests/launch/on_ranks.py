"""What the tests of agreement run on ranks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megatron_lynx.errors import ConfigError, HookRefused, Problem


def agreeing(rank: int, wrong: list[int], contents: list[str]) -> tuple[int | None, str]:
    """The exit status that a rank would end with, and what it said. Ranks in `wrong` have an error."""
    from megatron_lynx.launch.ending import agree

    error = ConfigError("no plan", [Problem("plan.yaml", "no such file", "a plan")]) if rank in wrong else None
    return _ended(partial(agree, error, same=contents[rank], what="--lynx-plan plan.yaml"))


def agreeing_in_different_errors(rank: int) -> int | None:
    """The exit status where rank 0 refuses a run (1) and rank 1 was given a wrong plan (2)."""
    from megatron_lynx.launch.ending import agree

    error = (HookRefused, ConfigError)[rank]("no plan", [Problem("plan.yaml", "another", "this one")])
    return _ended(partial(agree, error))[0]


def preparing(rank: int, plans: list[str], args: dict[str, Any]) -> tuple[int | None, str]:
    """The same of a launch in which every rank is given a plan of its own, and Megatron's arguments `args`."""
    from megatron_lynx.launch.hosts import host_named
    from megatron_lynx.launch.launch import Launch
    from megatron_lynx.launch.script import Flags

    launch = Launch(Flags(lynx_plan=plans[rank]), host_named("megatron-lm"))
    return _ended(partial(launch.prepare, SimpleNamespace(**args, rank=rank)))


def _ended(run: Callable[[], None]) -> tuple[int | None, str]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    said = io.StringIO()
    status = None
    with contextlib.redirect_stderr(said):
        try:
            run()
        except SystemExit as end:
            status = end.code
    return status, said.getvalue()
