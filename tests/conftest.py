"""Ranks for tests that train the real megatron-core: started once per size, used by all tests of a session."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Decided when torch and megatron-core are imported, so before anything here imports them. Ranks share few cores.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # a process of pytest-xdist has it; commands write to pipes of unknown width
sys.path.insert(0, str(Path(__file__).parent))

import pytest
from hypothesis import settings

from megatron_lynx.testbed.ranks import RankPool
from tests import hurry, instruments
from tests.nursery.process import start_rank

instruments.offer()
settings.register_profile("drawn", settings.default, deadline=None, derandomize=False)  # a busy machine must not fail a test
settings.register_profile("alike", settings.get_profile("drawn"), derandomize=True, database=None)
settings.load_profile("alike")  # every machine draws the same; `make long` others in each run (--hypothesis-profile drawn)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="skip what starts ranks, but for tests that are marked `quick`")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick: starts ranks, and is worth it even in a hurry (`make quick`)")
    config.addinivalue_line(
        "markers",
        "streams: what only a GPU would show and takes long on CPU ranks (`make streams`); not in `make test`",
    )
    config.addinivalue_line("markers", "long: combinations of what other tests hold one by one (`make long`); not in `make test`")
    config.addinivalue_line("markers", "slow: takes long, or starts ranks out of sight; not for `make quick`")


LAUNCHES_S, SLOW_S, ON_RANKS_S, OTHERS_S = 15, 10, 3, 0.3
"""About what a test takes."""


def seconds_of(item: pytest.Item) -> float:
    fixtures = set(getattr(item, "fixturenames", ()))
    if fixtures & {"run", "faulty", "planned", "undrained"}:
        return LAUNCHES_S
    if item.get_closest_marker("slow"):
        return SLOW_S
    return ON_RANKS_S if any("pool" in name for name in fixtures) else OTHERS_S


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that the processes of `make test` end together."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    items[:] = (item for of_file in sorted(files.values(), key=lambda them: -sum(map(seconds_of, them))) for item in of_file)


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage, those that tests ask for too, need not look at it any more. Planning makes
    many objects and no cycles: it takes a tenth less where they are rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves_stays() -> Iterator[None]:
    """The same of what is cached: a process that has run half of all files had millions of objects, and looked at them for half a
    second whenever a test collected garbage."""
    yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    hurry.set_off(item)


@pytest.fixture(scope="session", autouse=True)
def ranks_from_a_nursery() -> Iterator[None]:
    """Whoever runs something on ranks here, the product's commands too, gets ranks with torch imported, or none in a hurry."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RankPool, "process", start_rank)
        patched.setattr(RankPool, "run", hurry.run_unless_in_a_hurry)
        yield


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    """`pool_of(2).run(function, *args)` runs an importable function on two ranks, and returns their results."""
    yield from _pools()


@pytest.fixture(scope="module")
def own_pool_of() -> Iterator[Callable[[int], RankPool]]:
    """The same on ranks of this file of tests alone: what others leave in a rank's memory may go while bytes are counted."""
    yield from _pools()


def _pools() -> Iterator[Callable[[int], RankPool]]:
    pools: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        return pools.setdefault(ranks, RankPool(ranks))

    yield pool
    for started in pools.values():
        started.close()
