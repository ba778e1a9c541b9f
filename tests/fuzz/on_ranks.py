"""What one rank does in a case of the fuzzer. Runs inside `RankPool`."""

from __future__ import annotations

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from tests.transparency.trials import Trial, compare_with_stock


def wrong(rank: int, job: Job, plans: list[Plan], trial: Trial) -> list[list[str]]:
    """For each plan what differs from stock, and what is left after its training."""
    return [
        [
            *outcome.differing,
            *([f"{outcome.planned.frames_left} frames, storages or blocks are left"] if outcome.planned.frames_left else []),
            *(["hooks on saved tensors are left"] if torch._C._autograd._top_saved_tensors_default_hooks(True) else []),
        ]
        for outcome in compare_with_stock(rank, job, plans, trial)
    ]
