"""The fixed part of the fuzzer (`make fuzz`): a few seeds, on ranks that other tests have started, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_lynx.testbed.ranks import RankPool
from tests.fuzz.cases import INSTALLED, case_of
from tests.fuzz.running import problems_of

SEEDS = {"gpt": 5, "llama": 0, "experts": 11}
"""By the kind of layers. Under the first drawn plan with experts, training once stopped in step 1: half of what a forward's waits
recomputed was taken for tensors of the half that waited."""


@pytest.mark.parametrize(
    ("kind", "seed"),
    [pytest.param(*each, marks=[pytest.mark.long] if each[0] != "experts" else []) for each in SEEDS.items()],
    ids=str,
)
def test_drawn_jobs_train_as_stock_under_drawn_and_planned_plans(
    pool_of: Callable[[int], RankPool], kind: str, seed: int
) -> None:
    case = case_of(seed, (INSTALLED,), (kind,))
    assert not case.te, "ranks that import Megatron alone"
    assert {source: what for source, _, what in problems_of(case, pool_of(case.job.gpus))} == {}, f"{case}"


def test_a_seed_stands_for_one_case() -> None:
    assert case_of(17) == case_of(17) != case_of(18)
