"""Layouts that fit under no plan."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.config import load_job
from megatron_lynx.search.best_first import LayerCost, looks_at_plan
from megatron_lynx.search.search import least_memory
from megatron_lynx.solver.answer import Share, StageAnswer
from megatron_lynx.solver.stages import Stages


def test_no_share_is_tried_where_not_even_the_largest_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of 64 GPUs spent most of its time on solving such layouts for some twenty shares each."""
    job = load_job("jobs/llama-65b")
    budget = job.budget.model_copy(update={"memory_gib": 20.0})
    job = job.model_copy(update={"budget": budget, "policy": "planned", "offload_ratio": "auto"})
    cost, tried, known = LayerCost.of(job), list[float](), Stages._known
    stages_s = cost.stages_s(job)

    def counted(stages: Stages, stage: int, share: Share, *rest: Any) -> StageAnswer:
        tried.append(share.ratio)
        return known(stages, stage, share, *rest)

    monkeypatch.setattr(Stages, "_known", counted)
    assert not list(looks_at_plan(job, cost.profile, cost.floor_s(job, stages_s), max(stages_s)))
    assert tried == [0.0], "before the least memory is known"
    assert least_memory(job)[1].total > job.memory_budget_bytes
