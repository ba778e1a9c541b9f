"""Trains a case of the fuzzer on ranks, one plan after another, and says what is wrong with each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankError, RankPool
from tests.fuzz.cases import INSTALLED, RELEASES, Case
from tests.fuzz.on_ranks import wrong
from tests.te_releases import folder_of, python_path

LONGEST_S = 120.0
"""Seconds that ranks may take for one plan: exchanges that wait for each other never end."""


class Ranks:
    """Pools of ranks by what they import and how many they are, started when a case needs them."""

    def __init__(self) -> None:
        self._pools: dict[tuple[tuple[Path, ...], int], RankPool] = {}

    def of(self, case: Case) -> RankPool:
        """Skips the test where a release is not there."""
        folders = [] if case.release == INSTALLED else [folder_of("MEGATRON_CORE", case.release, "megatron/core")]
        folders += [folder_of("TRANSFORMER_ENGINE", RELEASES[case.release], "transformer_engine")] if case.te else []
        environment = {"PYTHONPATH": python_path(*folders)} if folders else {}
        return self._pools.setdefault((tuple(folders), case.job.gpus), RankPool(case.job.gpus, env=environment))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def problems_of(case: Case, pool: RankPool) -> Iterator[tuple[str, Plan, str]]:
    """Plans of the case that do not train as stock does: where each comes from, and what is wrong, or the error of a rank."""
    plans = list(case.plans())
    try:
        found = _wrong(case, pool, [plan for _, plan in plans])
    except (RankError, TimeoutError):
        found = [_wrong_alone(case, pool, plan) for _, plan in plans]
    yield from ((source, plan, what) for (source, plan), what in zip(plans, found, strict=True) if what)


def _wrong(case: Case, pool: RankPool, plans: list[Plan]) -> list[str]:
    """A line for each rank that has something to say, plan by plan."""
    ranks = pool.run(wrong, case.job, plans, case.trial, timeout_s=LONGEST_S * len(plans))
    said = (
        [f"rank {rank}: {', '.join(each)}" for rank, each in enumerate(of_plan) if each] for of_plan in zip(*ranks, strict=True)
    )
    return ["\n".join(lines) for lines in said]


def _wrong_alone(case: Case, pool: RankPool, plan: Plan) -> str:
    """The same of one plan, which ranks may not survive."""
    try:
        return _wrong(case, pool, [plan])[0]
    except (RankError, TimeoutError) as error:
        return str(error)
