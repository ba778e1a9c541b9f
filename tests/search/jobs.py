"""Jobs whose whole search space can be gone through."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from megatron_lynx.config import Job
from megatron_lynx.search.space import Space
from tests.config.jobs import catalogued_job


def small_job(model: str = "llama-7b", cluster: str = "a800-80g", *, batch: int = 8, layers: int = 8, **fields: Any) -> Job:
    """A shallow model; its layout and devices are not looked at by a search."""
    job = catalogued_job(model, cluster, gpus=1, batch=batch, parallel={}, policy="none", **fields)
    return job.model_copy(update={"model": job.model.model_copy(update={"layers": layers})})


def with_budget(job: Job, memory_gib: float) -> Job:
    return job.model_copy(update={"budget": job.budget.model_copy(update={"memory_gib": memory_gib})})


def jobs_of(job: Job, gpus: int) -> Iterator[Job]:
    return chain.from_iterable(Space(job, gpus).layouts())
