"""The double-buffered schedule on its ranks.

Weights are what the rule of two versions makes of them, in every bit; also where ranks wait for each other and for their devices
behind every update, as Megatron does when it logs every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.schedules import SEED, TrainedModel, Way, differing
from megatron_lynx.config.job import Job
from scripts.gpu_check.part import Answer

BATCHES = 4


def two_versions(rank: int, job: Job, way: Way) -> Answer:
    """Runs inside `RankPool`."""
    from tests.instruments.groups import initialise

    wrong = [f"weight {name} is not what the rule makes of it" for name in differing(rank, job, way, BATCHES)]
    initialise(job)
    wrong += [f"weight {name} differs where ranks wait for each other" for name in _differing_when_waited_for(job, way)]
    return Answer(wrong=tuple(wrong[:3]), notes=() if wrong else (f"weights of {BATCHES} batches are equal in every bit",))


def _differing_when_waited_for(job: Job, way: Way) -> list[str]:
    from megatron_lynx.testbed.groups import seed_random_numbers

    weights: list[dict[str, torch.Tensor]] = []
    for kind in (TrainedModel, WaitedFor):
        model = kind(job, way)
        seed_random_numbers(SEED)
        model.run(BATCHES)
        weights.append(model.weights())
    return [name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])]


class WaitedFor(TrainedModel):
    """All ranks, and their devices, are waited for behind every update."""

    def _update(self) -> Callable[[], Any]:
        update = super()._update()

        def then_wait() -> None:
            update()
            dist.barrier()
            torch.cuda.synchronize()
            dist.barrier()

        return then_wait
