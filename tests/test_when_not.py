"""The page that says where a plan gains little has the figures of today's simulator."""

from __future__ import annotations

from itertools import accumulate, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import braided, when_not_experts
from benchmarks.waits_bound import bound_s
from benchmarks.when_not import CASES, Row, job_of, row, rows, table, within
from megatron_lynx.profiler.analytic import analytic_profile

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[1] / "docs/generated/when_not.md"


@pytest.fixture(scope="module")
def priced() -> tuple[Row, ...]:
    return tuple(rows({}))


SOME = ("t=1, p=1: no collective, no message", "t=8, p=1", "H800, t=8, p=1")


@pytest.mark.parametrize("what", SOME)
def test_some_rows_are_current(what: str) -> None:
    line = table([row(what, job_of(dict(CASES)[what]))]).splitlines()[-1]
    assert line in PAGE.read_text(), "run `python -m scripts.make_pages when_not`, and look at the text around the table, too"


@pytest.mark.long
def test_the_table_is_current(priced: tuple[Row, ...]) -> None:
    assert table(priced) in PAGE.read_text(), (
        "run `python -m scripts.make_pages when_not`, and look at the text around the table, too"
    )


@pytest.mark.parametrize(
    ("what", "least"), [("t=8, p=1", 1.09), ("H800, t=8, p=1", 0.91), ("H800 (NVLink 200 GB/s)", 0.94)], ids=str
)
@pytest.mark.long
def test_no_plan_is_below_its_bound(priced: tuple[Row, ...], what: str, least: float) -> None:
    """What is out of reach at these budgets, whatever a planner does."""
    (row,) = (row for row in priced if row.what == what)
    job = within(job_of(dict(CASES)[what]))
    assert least * row.none_s < bound_s(job, analytic_profile(job)) <= row.in_place_s


@pytest.mark.long
def test_its_statements_hold(priced: tuple[Row, ...]) -> None:
    """What the page says in words."""
    by_name = {row.what: row for row in priced}
    bare = by_name["t=1, p=1: no collective, no message"]
    assert bare.hidden == 0
    assert all(row.ours_s <= row.in_place_s < row.best_stock_s <= row.block_s for row in by_name.values())
    least = by_name["t=1, p=2: messages between stages alone"]
    assert all(least.best_stock_s / least.ours_s <= row.best_stock_s / row.ours_s for row in by_name.values())
    assert bare.best_stock.startswith("block")
    assert all("mlp" in row.best_stock and "offload" in row.best_stock for row in by_name.values() if row != bare)
    assert by_name["t=8, p=1"].hidden < 0.4 < 0.94 < by_name["H800, t=8, p=1"].hidden < by_name["A100 on PCIe"].hidden
    assert by_name["t=8, p=1"].hidden_s > 0.85 * by_name["t=8, p=1"].hideable_s
    assert all(row.hidden_s <= row.hideable_s * (1 + 1e-9) for row in by_name.values())
    assert by_name["H800, t=8, p=1"].hidden_best_s < by_name["H800, t=8, p=1"].ours_s
    hidden_s, hideable_s = (sum(getattr(row, name) for row in by_name.values()) for name in ("hidden_s", "hideable_s"))
    assert hidden_s > 0.85 * hideable_s, "what waits could hide is hidden, nearly all of it"
    reference = by_name["t=4, p=2, m=16, A100 (NVLink 300 GB/s)"]
    assert reference.ours_s < reference.hidden_best_s < reference.in_place_s < reference.best_stock_s


@pytest.mark.long
def test_a_row_of_braided_passes_is_current() -> None:
    """All layers on one stage: the shortest order of so many pieces takes half a minute."""
    *_, line = braided.lines("H800, t=8, p=1")
    assert line in PAGE.with_name("braided.md").read_text()


def test_a_braid_fills_waits_and_holds_one_micro_batch_more() -> None:
    job = job_of(dict(CASES)["t=4, p=4"])
    found = braided.braided(job, analytic_profile(job))
    assert 0 <= found.left_s < 0.05 * found.waits_s
    assert found.none_s - job.microbatches * found.waits_s < found.step_s < found.none_s
    assert found.more_bytes > 0


PASSES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=3)
"""Seconds of compute, and of the wait after it."""


@given(st.tuples(PASSES, PASSES))
def test_the_shortest_braid_is_the_best_of_all_orders(passes: tuple[list[tuple[int, int]], ...]) -> None:
    stretches, lengths_s = [], []
    for one in passes:
        ends = [*accumulate(compute + wait for compute, wait in one)]
        stretches.append([(end - wait - compute, end - wait) for end, (compute, wait) in zip(ends, one, strict=True)])
        lengths_s.append(ends[-1])
    several = permutations([0] * len(passes[0]) + [1] * len(passes[1]))
    assert braided.braided_s(*stretches, tuple(lengths_s)) == min(in_order_s(order, passes) for order in {*several})


def in_order_s(order: tuple[int, ...], passes: tuple[list[tuple[int, int]], ...]) -> float:
    ready_s, free_s, left = [0, 0], 0, [list(one) for one in passes]
    for which in order:
        compute, wait = left[which].pop(0)
        free_s = max(free_s, ready_s[which]) + compute
        ready_s[which] = free_s + wait
    return max(ready_s)


@pytest.mark.long
def test_rows_of_experts_are_current() -> None:
    """One of them: each takes seconds."""
    text = PAGE.with_name("when_not_experts.md").read_text()
    for what, change in when_not_experts.CASES[1:2]:
        assert when_not_experts.line(when_not_experts.row(what, when_not_experts.job_of(change))) in text, what
