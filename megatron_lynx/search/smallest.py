"""The smallest layout of a job that states only model, cluster and number of devices.

for each policy: none, selective, full                    until one fits
    layouts without context parallelism, one chunk, micro-batch 1, the fewest ranks per replica first
"""

from __future__ import annotations

from megatron_lynx.config.job import Job, Policy
from megatron_lynx.search.fit import Fits, fit
from megatron_lynx.search.nearest import Asked, nothing_fits
from megatron_lynx.search.space import Layout, Space

STOCK: tuple[Policy, ...] = ("none", "selective", "full")
TOKENS_OF_A_BATCH = 4 * 2**20
"""4 million tokens, as for large models."""


def batch_of(seq: int, gpus: int) -> int:
    """Sequences of `TOKENS_OF_A_BATCH`, a multiple of the devices."""
    return max(1, round(TOKENS_OF_A_BATCH / seq / gpus)) * gpus


def smallest_layout(job: Job) -> Job:
    """Return the job in the fitting layout with the fewest ranks per replica, under the first policy with one.

    Raises `Infeasible` if nothing fits.
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
