"""The smallest share that fits: it fits, less does not, and where nothing fits it says what binds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.cost.stage_memory import stage_parts
from megatron_lynx.errors import Infeasible
from megatron_lynx.solver.offload import shortages, smallest_ratio
from megatron_lynx.units import GIB
from tests.config.jobs import catalogued_job


def with_budget(gib, **fields):
    return catalogued_job(budget={"memory_gib": gib}, **fields)


def least_and_most_gib():
    job = catalogued_job()
    return [max(stage_parts(job, stage, share).fullest.total for stage in range(8)) / GIB for share in (1.0, 0.0)]


@settings(max_examples=20, deadline=None)
@given(st.floats(0.001, 1))
@pytest.mark.slow
def test_the_smallest_share_fits_and_a_thousandth_less_does_not(place):
    least, most = least_and_most_gib()
    job = with_budget(least + place * (most - least))
    ratio = smallest_ratio(job)
    assert shortages(job, ratio) == []
    assert ratio == 0 or shortages(job, ratio - 0.001)


def test_more_memory_never_offloads_more():
    least, most = least_and_most_gib()
    ratios = [smallest_ratio(with_budget(least + share * (most - least))) for share in (0.01, 0.2, 0.5, 0.8, 1.01)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == 0


def test_what_cannot_fit_says_which_stage_and_by_how_much():
    with pytest.raises(Infeasible, match=r"stage 0: found \d+\.\d+ GiB, most of it .*, needed at most 10\.00 GiB; \d+\.\d+ GiB"):
        smallest_ratio(with_budget(10.0))


def test_host_memory_bounds_what_can_be_offloaded():
    least, most = least_and_most_gib()
    cluster = catalogued_job().cluster
    small = cluster.model_copy(update={"node": cluster.node.model_copy(update={"host_memory_gib": 8.0})})
    job = with_budget((least + most) / 2).model_copy(update={"cluster": small})
    with pytest.raises(Infeasible, match="host memory of a node: found"):
        smallest_ratio(job)
