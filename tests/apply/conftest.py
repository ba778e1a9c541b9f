"""Ranks that play a GPU of one generation: which recipes of FP8 it has is asked of its capability."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from megatron_lynx.testbed.ranks import RankPool

from ..te_releases import pools_with

BLACKWELL = {"TESTBED_CAPABILITY": "10.0"}


@pytest.fixture(scope="module")
def hopper() -> Iterator[Callable[[int], RankPool]]:
    yield from pools_with("2.9")


@pytest.fixture(scope="module")
def blackwell() -> Iterator[Callable[[int], RankPool]]:
    yield from pools_with("2.9", **BLACKWELL)
