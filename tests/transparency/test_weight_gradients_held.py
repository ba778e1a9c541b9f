"""What deferred weight gradients hold in a run is what the planner reckons with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.anatomy import DENSE, LINEARS
from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.cost.section import weight_gradient
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.report.drawing import kind_of
from megatron_lynx.testbed.ranks import RankPool
from tests.deferring import deferring
from tests.profiler.made_up import made_up_profile
from tests.tiny_jobs import tiny_job
from tests.transparency.test_every_bit import LAYOUTS
from tests.transparency.test_pieces import in_pieces
from tests.transparency.test_weight_gradients import FUSED, counts_of, nothing
from tests.transparency.trials import Trial


@pytest.mark.parametrize("layout", ["TP2", "TP2+SP"])
@pytest.mark.parametrize("like", ["gpt", "llama"])
def test_bytes_are_those_that_are_priced(pool_of: Callable[[int], RankPool], layout: str, like: Any) -> None:
    """All of a micro-batch's wait for the next forward: at the end of its backward all of them are pending."""
    job = tiny_job(like, **LAYOUTS[layout])
    profile = made_up_profile(job)
    plan = deferring(nothing(job), chosen=is_forward)
    layer_bytes = sum(weight_gradient(profile, section, linear).bytes for section in DENSE.values() for linear in section.linears)
    ((counts,), *_) = counts_of(pool_of, job, [plan], Trial(training={"ddp": True}, model=FUSED))
    assert counts.deferred_bytes == layer_bytes * job.model.layers


def test_counts_are_those_that_are_simulated(pool_of: Callable[[int], RankPool]) -> None:
    """How many run in waits and how many are flushed, with room for all and with room for a few; whole and in pieces."""
    job = tiny_job("gpt", **LAYOUTS["TP2"])
    profile = made_up_profile(job, link_s=0.1)  # longer than a piece takes, copies of its gradient included
    plans = [deferring(nothing(job), chosen=is_forward), deferring(nothing(job), chosen=is_forward, most_bytes=40_000)]
    plans += [in_pieces(plan, dict.fromkeys(LINEARS, 3)) for plan in plans]
    for found in counts_of(pool_of, job, plans, Trial(training={"ddp": True}, model=FUSED)):
        for plan, counts in zip(plans, found, strict=True):
            spans = [span for span in rehearse(plan, profile).timeline().ranks[0] if span.kind == "weight_gradient"]
            filled = {span.end_s for span in spans if kind_of(span) == "weight_gradient"}
            flushed = [span for span in spans if kind_of(span) == "flushed" and span.start_s not in filled]
            assert (len(filled), len(flushed)) == (counts.filled, counts.flushed)
