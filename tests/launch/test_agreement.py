"""One rank's mistake ends all ranks, and only rank 0 says why."""

from __future__ import annotations

import pytest

from . import on_ranks


def test_ranks_that_agree_go_on(pool_of):
    assert pool_of(2).run(on_ranks.agreeing, [], ["a", "a"]) == [(None, "")] * 2


@pytest.mark.parametrize(
    ("wrong", "contents", "says"),
    [
        ([1], ["a", "a"], "megatron-lynx: no plan\n  - rank 1: plan.yaml: found no such file, needed a plan\n"),
        ([0], ["a", "a"], "megatron-lynx: no plan\n  - rank 0: plan.yaml: found no such file, needed a plan\n"),
        ([0, 1], ["a", "a"], "megatron-lynx: no plan\n  - plan.yaml: found no such file, needed a plan\n"),
        (
            [],
            ["a", "b"],
            "megatron-lynx: the ranks disagree\n  - --lynx-plan plan.yaml: found other contents on rank 1 than on rank 0, "
            "needed the same file on all ranks\n",
        ),
    ],
    ids=["rank 1", "rank 0", "both", "contents"],
)
def test_all_end_together(pool_of, wrong, contents, says):
    assert pool_of(2).run(on_ranks.agreeing, wrong, contents) == [(2, says), (2, "")]
