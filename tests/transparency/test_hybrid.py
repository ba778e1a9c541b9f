"""The hybrid translation of a GPT under the GPT's own plans equals stock in every bit: halves are layers of their own there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_lynx.testbed.deferring import deferring
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.long import long
from tests.te_releases import pools_with
from tests.transparency.checkpoints import checkpointed
from tests.transparency.hybrid_models import compare_hybrid, refused
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, replayable
from tests.transparency.trials import Trial

Pools = Callable[[int], RankPool]

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2, "microbatches": 4},
    "PP2xVPP2": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
}


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Pools]:
    yield from pools_with("2.17", core="0.19")


def hybrid_job(**fields: Any) -> Any:
    return tiny_job("llama", implementation="transformer_engine", **fields)


@pytest.mark.parametrize("layout", ["TP2+SP", "PP2xVPP2", *long("PP2")])
def test_every_bit(pool_of: Pools, layout: str) -> None:
    job = hybrid_job(**LAYOUTS[layout])
    kept, everything = plan_for(job, lambda layer: ()), plan_for(job, lambda layer: replayable(job, gather=True))
    mixed = plan_for(job, lambda layer: replayable(job) if layer % 2 else ())
    candidates = [kept, everything, mixed, checkpointed(kept, "layer"), checkpointed(kept, "mlp"), offloading(mixed, 8_000)]
    for outcomes in pool_of(job.gpus).run(compare_hybrid, job, candidates, Trial(canaries=layout == "TP2+SP")):
        assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)
        assert [outcome.planned.frames_left for outcome in outcomes] == [0] * len(candidates)
        assert outcomes[1].planned.counts[-1].hidden > 0 or job.parallel.tensor * job.chunks == 1


def test_weight_gradients_in_waits(pool_of: Pools) -> None:
    job = hybrid_job(**LAYOUTS["TP2+SP"])
    plan = deferring(plan_for(job, lambda layer: replayable(job, gather=True)))
    trial = Trial(training={"ddp": True}, model={"gradient_accumulation_fusion": True})
    for [outcome] in pool_of(2).run(compare_hybrid, job, [plan], trial):
        assert outcome.differing == []
        assert outcome.planned.counts[-1].filled == outcome.planned.counts[-1].deferred > 0


@pytest.mark.parametrize("pattern", ["**--", "*-*", "-*-*"])
def test_a_stack_that_is_no_translation_is_refused(pool_of: Pools, pattern: str) -> None:
    job = hybrid_job(layers=2)
    [said] = pool_of(1).run(refused, job, plan_for(job, lambda layer: ()), pattern)
    assert f"--hybrid-layer-pattern: found {pattern} on this rank, needed pairs of an attention and an MLP" in said
