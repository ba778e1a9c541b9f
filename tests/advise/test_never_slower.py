"""A plan is never slower than stock Megatron's best setting in its layout: what stock can do, a plan can have."""

from __future__ import annotations

import shlex
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.advise import answered
from megatron_lynx.advise.today import asked_launch
from megatron_lynx.profiler.analytic import analytic_profile
from scripts.make_plans import launch_words
from tests.advise.test_screen import EXPERTS, LAUNCH
from tests.long import long

pytestmark = pytest.mark.slow

SLOWER_AT_MOST = 0.006
"""Of a step. Stages are solved one by one, and copies to the host in twentieths."""

OVERLAPPING = f"{EXPERTS} --moe-token-dispatcher-type alltoall --num-layers-per-virtual-pipeline-stage 6"


def not_slower(words: list[str], cluster: str, memory_gib: float | None = None) -> bool:
    """Whether there is a plan. Asserts that it then takes no longer than stock's best."""
    asked = asked_launch(words, cluster, changes={} if memory_gib is None else {"budget.memory_gib": memory_gib})
    found = answered(asked.job, analytic_profile(asked.job), asked.reading, refused=asked.refused, near=False, copies=True)
    if found.planned is None or found.stock is None:
        return False
    stock, plan = found.stock.row, found.planned
    assert plan.step.expected_s <= (1 + SLOWER_AT_MOST) * stock.expected_s, (found.stock.setting.name, stock.memory_bytes)
    assert plan.memory_bytes <= asked.job.memory_budget_bytes
    return True


FLAGS = {
    "dense": "",
    "userbuffers": "--tp-comm-overlap",
    "experts": OVERLAPPING,
    "exchanges overlapped": f"{OVERLAPPING} --overlap-moe-expert-parallel-comm",
}
CLUSTERS = ("a100-80g", "h100-80g", "h800-80g")
IN_MAKE_TEST = [("dense", "h100-80g"), ("userbuffers", "a100-80g"), ("experts", "h800-80g"), ("exchanges overlapped", "a100-80g")]
"""All flags, and all clusters; `make long` has them in all pairs."""


@pytest.mark.parametrize(
    ("flags", "cluster"),
    [*IN_MAKE_TEST, *long(*(pair for pair in product(FLAGS, CLUSTERS) if pair not in IN_MAKE_TEST))],
)
def test_a_launch(flags: str, cluster: str) -> None:
    assert not_slower(shlex.split(f"{LAUNCH} {FLAGS[flags]}"), cluster)


def test_layouts_one_step_away() -> None:
    """Stock's best offloads there, and the plan did not."""
    asked = asked_launch(shlex.split(f"{LAUNCH} {EXPERTS} --moe-token-dispatcher-type alltoall"), "h100-80g")
    found = answered(asked.job, analytic_profile(asked.job), asked.reading, copies=True)
    pairs = [(near.planned, near.stock) for near in found.near if near.planned is not None and near.stock is not None]
    assert any(stock.setting.offload for _, stock in pairs)
    for plan, stock in pairs:
        assert plan.step.expected_s <= (1 + SLOWER_AT_MOST) * stock.row.expected_s, stock.setting.name


@pytest.mark.parametrize("name", ["llama3_8b", *long("llama3_70b")])
def test_a_ready_launch(name: str) -> None:
    assert not_slower(launch_words(name, "h100-80g", "none"), "h100-80g")


def test_a_tight_budget() -> None:
    """In which stock has to recompute or to offload."""
    assert not_slower(shlex.split(LAUNCH), "h100-80g", 36.0)


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(CLUSTERS),
    st.sampled_from(["", EXPERTS, OVERLAPPING]),
    st.sampled_from([1, 2, 4]),
    st.floats(20, 70),
)
def test_drawn_budgets(cluster: str, flags: str, micro: int, memory_gib: float) -> None:
    """As `test_a_tight_budget`, wherever."""
    not_slower(shlex.split(f"{LAUNCH} {flags} --micro-batch-size {micro}"), cluster, memory_gib)
