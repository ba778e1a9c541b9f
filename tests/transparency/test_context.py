"""Sequences cut among context-parallel ranks: all is recomputed, hidden and offloaded as anywhere, but for the core attention.

Its exchange over the context-parallel group is real; only its kernels are stood in for (`tests.instruments.context_attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_lynx.config.job import Job
from megatron_lynx.testbed.ranks import RankPool
from tests.long import long
from tests.plan.strategies import plans_for, samples
from tests.tiny_jobs import tiny_job
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_every_bit import checked
from tests.transparency.trials import Trial, train

Pools = Callable[[int], RankPool]

TP2 = {"tensor": 2, "sequence_parallel": True}
PP2 = {"pipeline": 2, "microbatches": 4}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "CP2, a ring": ("llama", {"context": 2}),
    "CP2, gathered": ("gpt", {"context": 2, "context_exchange": "all_gather"}),
    "CP2, traded": ("gpt", {"context": 2, "context_exchange": "a2a"}),
    "CP2xTP2+SP, a ring": ("llama", {"context": 2, **TP2}),
    "CP2xTP2+SP, gathered": ("gpt", {"context": 2, "context_exchange": "all_gather", **TP2}),
    "CP2xPP2, a ring": ("llama", {"context": 2, **PP2}),
    "CP2xPP2, gathered": ("gpt", {"context": 2, "context_exchange": "all_gather", **PP2}),
}


def job_of(layout: str) -> Job:
    like, fields = LAYOUTS[layout]
    return tiny_job(like, **fields)  # type: ignore[arg-type]


TRAINING = {"ddp": True, "optimizer": "megatron"}
"""With reductions over data and context."""


LATER = (*(layout for layout in LAYOUTS if "x" in layout), "CP2, gathered")
"""Beside other groups; some of these have random plans, and some what goes to the host, both with gathered sequences."""


@pytest.mark.parametrize("layout", [*(layout for layout in LAYOUTS if layout not in LATER), *long(*LATER)])
def test_every_bit(pool_of: Pools, layout: str) -> None:
    """Everything but the core attention, on demand and hidden; the exchanges of a step are stock's, and each runs once."""
    job = job_of(layout)
    everything, gather = recomputable(job), job.parallel.sequence_parallel
    candidates = [
        plan_for(job, lambda layer: everything, windows=False),
        plan_for(job, lambda layer: recomputable(job, gather=gather)),
        plan_for(job, lambda layer: everything if layer % 2 else ("rotary",)),
    ]
    for outcomes in checked(pool_of, job, candidates, Trial(training=TRAINING, counted=True, canaries=True)):
        for outcome in outcomes:
            assert sorted(outcome.planned.collectives) == sorted(outcome.stock.collectives)


@pytest.mark.parametrize("layout", ["CP2xPP2, gathered", *long("CP2xPP2, a ring")])
def test_offloaded_with_recomputation(pool_of: Pools, layout: str) -> None:
    """What the core attention saved goes to the host, with all else that is kept, where everything else is recomputed."""
    job = job_of(layout)
    keeping, recomputing = plan_for(job, lambda layer: ()), plan_for(job, lambda layer: recomputable(job))
    candidates = [offloading(keeping, 8_000), offloading(recomputing, 1 << 20)]
    for rank, outcomes in enumerate(checked(pool_of, job, candidates, Trial(training=TRAINING, tampered=True))):
        for outcome in outcomes:
            last = outcome.planned.counts[-1]
            assert last.offloaded_bytes == last.reloaded_bytes
            assert (last.offloaded_bytes > 0) == (rank < 2)


@pytest.mark.parametrize("layout", ["CP2xTP2+SP, gathered", *long("CP2, a ring")])
def test_random_plans(pool_of: Pools, layout: str) -> None:
    job = job_of(layout)
    checked(pool_of, job, samples(plans_for(job), 4), Trial(steps=1, backward_thread=True, canaries=True))


def trained(rank: int, job: Job) -> dict[str, torch.Tensor]:
    from tests.instruments.groups import initialise

    initialise(job)
    return train(job, None, Trial(steps=1, training={"ddp": True, "optimizer": None})).tensors


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a"])
def test_the_stand_in_computes_what_uncut_sequences_have(pool_of: Pools, exchange: Any) -> None:
    """Losses of the ranks add up to the uncut sequence's, and reduced gradients are the same, up to rounding."""
    fields: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "kv_groups": 2}
    [whole] = pool_of(1).run(trained, tiny_job("llama", **fields))
    cut = pool_of(2).run(trained, tiny_job("llama", context=2, context_exchange=exchange, **fields))
    for name, tensor in whole.items():
        parts = [each[name] for each in cut]
        found = sum(parts) if "loss" in name else parts[0]
        torch.testing.assert_close(found, tensor, rtol=1e-4, atol=1e-6)


def test_a_plan_that_would_exchange_again_is_refused() -> None:
    job = tiny_job("llama", context=2)
    with pytest.raises(
        ValueError, match=r"stages\.0 layers 1: found core_attention recomputed, needed kept with parallel.context 2"
    ):
        plan_for(job, lambda layer: ["core_attention"] if layer == 1 else [])
