"""Ranks for tests that train the real megatron-core: started once per size, used by all tests of a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from megatron_lynx.testbed.ranks import RankPool

# Decided when megatron-core is imported, so before any test module is.
os.environ["TORCHDYNAMO_DISABLE"] = "1"


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    """`pool_of(2).run(function, *args)` runs an importable function on two ranks, and returns their results."""
    pools: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        return pools.setdefault(ranks, RankPool(ranks))

    yield pool
    for started in pools.values():
        started.close()
