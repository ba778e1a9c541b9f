"""What the tests of agreement run on ranks."""

from __future__ import annotations

import contextlib
import io

import torch.distributed as dist

from megatron_lynx.errors import ConfigError, Problem


def agreeing(rank: int, wrong: list[int], contents: list[str]) -> tuple[int | None, str]:
    """The exit status that a rank would end with, and what it said. Ranks in `wrong` have an error."""
    from megatron_lynx.launch.agreement import agree

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    error = ConfigError("no plan", [Problem("plan.yaml", "no such file", "a plan")]) if rank in wrong else None
    said = io.StringIO()
    status = None
    with contextlib.redirect_stderr(said):
        try:
            agree(error, same=contents[rank], what="--lynx-plan plan.yaml")
        except SystemExit as end:
            status = end.code
    return status, said.getvalue()
