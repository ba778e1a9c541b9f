"""On the ranks of a test: MLPs whose activation has parameters of its own, as xIELU of Swiss AI's fork has two."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from tests.transparency.trials import Outcome, Trial, compare_with_stock


class Learned(torch.nn.Module):
    """A parabola on one side, an exponential on the other; how steep each is is learned (xIELU's formula as it is published)."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = torch.nn.Parameter(torch.tensor([0.8]))
        self.negative = torch.nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steep, deep = torch.nn.functional.softplus(self.positive), torch.nn.functional.softplus(self.negative) + 0.5
        return torch.where(x > 0, steep * x * x, deep * (torch.expm1(x.clamp(max=-1e-6)) - x)) + 0.5 * x


def compare(rank: int, job: Job, candidates: list[Plan], trial: Trial) -> list[Outcome]:
    """As `compare_with_stock`, of MLPs that have it."""
    from megatron.core.transformer.mlp import MLP

    usual = MLP.__init__

    def with_it(self: Any, *args: Any, **kwargs: Any) -> None:
        usual(self, *args, **kwargs)
        self.activation_func = Learned()

    with patch.object(MLP, "__init__", with_it):
        return compare_with_stock(rank, job, candidates, trial)
