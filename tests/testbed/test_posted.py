"""A synchronisation that a GPU would never come back from does not come back on CPU ranks either, and says what it waits for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tiny_jobs import tiny_job

from . import posted_on_ranks


@pytest.mark.quick
def test_a_receive_whose_sender_synchronises_first_is_a_named_hang(pool_of: Any) -> None:
    """Ranks used to run through this: the stand-in's synchronize waited for nothing. The message arrives all the same later."""
    (said, arrived), _ = pool_of(2).run(posted_on_ranks.wait_before_sending)
    assert "torch.cuda.synchronize() has not returned within 0.3 s: on a GPU this is a hang" in said
    assert "rank 0: found recv from rank 1 (float32 [3]), asked for at " in said
    assert "posted_on_ranks.py:" in said
    assert arrived == [1.0] * 3


pytestmark = pytest.mark.streams


def test_what_was_posted_is_over_behind_it(pool_of: Any) -> None:
    """Messages, collectives, coalesced ones; they may be waited for again, which gloo's messages themselves do not allow."""
    for found in pool_of(2).run(posted_on_ranks.post_and_synchronise):
        assert found == {"message": [1.0], "sum": [3.0], "gathered": [1.0, 2.0], "coalesced": [6.0], "again": True, "pending": 0}


def test_told_to_wait_for_nothing(pool_of: Any) -> None:
    assert pool_of(2).run(posted_on_ranks.wait_for_nothing) == [[0.0], [0.0]]


@pytest.mark.parametrize(
    "layout",
    [{"pipeline": 4, "microbatches": 5}, {"pipeline": 2, "replicas": 2, "microbatches": 4, "layers_per_chunk": 1}],
    ids=str,
)
def test_a_step_leaves_nothing_pending(pool_of: Any, layout: dict[str, Any]) -> None:
    """Otherwise works, and their tensors, would pile up in runs that never synchronise."""
    job = tiny_job("gpt", **layout)
    assert pool_of(job.gpus).run(posted_on_ranks.left_by_steps, job) == [0] * job.gpus
