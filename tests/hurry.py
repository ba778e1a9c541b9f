"""`pytest --quick`: no ranks but for the tests that are marked `quick`.

Whatever runs something on ranks asks here first, and the test that wanted it is skipped. So nobody has to know, or to keep up to
date, which tests start ranks.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from megatron_lynx.testbed.ranks import RankPool

NO_RANKS = "TESTS_NO_RANKS"
"""The environment variable that is set while a test may not have ranks."""


def set_off(item: pytest.Item) -> None:
    """For a test that is about to be set up."""
    os.environ.pop(NO_RANKS, None)
    if item.config.getoption("--quick"):
        if item.get_closest_marker("slow"):
            pytest.skip("slow")
        if not item.get_closest_marker("quick"):
            os.environ[NO_RANKS] = "1"


def skip_in_a_hurry() -> None:
    if NO_RANKS in os.environ:
        pytest.skip("runs on ranks")


def run_unless_in_a_hurry(pool: RankPool, *args: Any, **kwargs: Any) -> list[Any]:
    """In place of `RankPool.run`."""
    skip_in_a_hurry()
    return run_as_ever(pool, *args, **kwargs)


run_as_ever = RankPool.run
