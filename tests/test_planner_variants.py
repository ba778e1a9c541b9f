"""Plans with other flags of Megatron: which variants are planned, and which one is taken."""

from __future__ import annotations

import shlex
from itertools import product

import pytest

from megatron_lynx.advise.today import asked_launch
from megatron_lynx.config.job import Job
from megatron_lynx.errors import LynxError
from megatron_lynx.planner import Decision
from megatron_lynx.planner.decision import fastest_decision
from megatron_lynx.planner.variants import fastest, fastest_variant, variants
from megatron_lynx.profiler.analytic import analytic_profile
from tests.advise.test_never_slower import OVERLAPPING
from tests.advise.test_screen import LAUNCH

pytestmark = pytest.mark.slow

RELEASE = "0.19.2"
BETWEEN_NODES = (
    f"{OVERLAPPING} --num-layers 12 --num-layers-per-virtual-pipeline-stage 3 --num-experts 16 --moe-router-topk 8 "
    "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --moe-ffn-hidden-size 1024"
)
"""Plans are fastest with exchanges overlapped."""


def job_of(flags: str, memory_gib: float, cluster: str = "h100-80g") -> Job:
    words = shlex.split(f"{LAUNCH} {flags}".replace("--nnodes 2", "--nnodes 4"))
    return asked_launch(words, cluster, changes={"budget.memory_gib": memory_gib}).job


@pytest.mark.parametrize(
    ("flags", "memory_gib"),
    [*product(["", OVERLAPPING], [25.0, 40.0, 70.0]), (BETWEEN_NODES, 20.0), (BETWEEN_NODES, 30.0)],
)
def test_the_plan_is_the_fastest_of_all_variants(flags: str, memory_gib: float) -> None:
    job = job_of(flags, memory_gib)
    profile, plans = analytic_profile(job), list[Decision]()
    for variant in variants(job, RELEASE):
        try:
            plans.append(fastest_decision(variant, profile))
        except LynxError:
            continue
    best, taken = fastest(plans), fastest_variant(job, profile, RELEASE)
    assert (best is None) == (taken is None)
    if best is not None and taken is not None:
        assert (taken.asked, taken.step) == (best.asked, best.step)
