"""The layout of a job of which only model, cluster and number of devices are stated.

for each policy: none, selective, full                    until one fits
    layouts without context parallelism, one chunk, micro-batch 1, the fewest ranks to a replica first
"""

from __future__ import annotations

from megatron_lynx.config.job import Job, Policy
from megatron_lynx.search.fit import Fits, fit
from megatron_lynx.search.nearest import Asked, nothing_fits
from megatron_lynx.search.space import Layout, Space

STOCK: tuple[Policy, ...] = ("none", "selective", "full")
TOKENS_OF_A_BATCH = 4 * 2**20
"""As large models are trained: 4 million tokens."""


def batch_of(seq: int, gpus: int) -> int:
    """Sequences of `TOKENS_OF_A_BATCH`, a multiple of the devices."""
    return max(1, round(TOKENS_OF_A_BATCH / seq / gpus)) * gpus


def smallest_layout(job: Job) -> Job:
    """The job in the layout with the fewest ranks to a replica that fits, under the first policy under which one does.

    Raises `Infeasible` where nothing fits.
    """
    space = Space(job, job.gpus, schedules=("flush",), contexts=(1,))
    jobs = [next(space.on(layout)) for layout in sorted(space.layouts(), key=_size)]
    for policy in STOCK:
        for one in jobs:
            tried = one.model_copy(update={"policy": policy})
            if isinstance(fit(tried, offload=False), Fits):
                return tried
    raise nothing_fits(Asked(space, STOCK, offload=False), (), STOCK)


def _size(layout: Layout) -> tuple[int, ...]:
    parallel = layout.parallel
    return parallel.ranks, parallel.pipeline, parallel.expert, not parallel.sequence_parallel
