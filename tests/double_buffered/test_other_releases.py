"""Other releases of megatron-core: the version rule to the bit there, too. They are where `tests/apply` finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from megatron_lynx.testbed.ranks import RankPool
from tests.tiny_jobs import tiny_job

from ..long import long
from ..te_releases import folder_of, python_path
from . import on_ranks

RELEASES = ("0.17", "0.18", "0.19", "0.20")
SHARDED = {"distributed_optimizer": True, "dtype": "bf16"}


@pytest.fixture(scope="module", params=RELEASES)
def release(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def pool_on(release) -> Iterator[Callable[[int], RankPool]]:
    path = python_path(folder_of("MEGATRON_CORE", release, "megatron/core"))
    with RankPool(2, env={"PYTHONPATH": path}) as pool:
        yield lambda ranks: pool


@pytest.mark.parametrize("layout", [SHARDED, *long({})], ids=str)
def test_the_version_rule_to_the_bit(pool_on, release, layout):
    how = {"ddp": True, "optimizer": "megatron", "defer_updates": True, "overlap_grad_reduce": True}
    job = tiny_job("gpt", pipeline=2, microbatches=3, **layout)
    assert pool_on(2).run(on_ranks.differing, job, how) == [[], []]
