"""Where the host waits for the device because Megatron reads a result: `doctor` says it of the check for NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_lynx.testbed.ranks import RankPool
from tests.queues.on_ranks import reads_of_losses

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize(("mode", "reads"), [("validate_results", [0, 4]), ("disabled", [4, 4])])
def test_each_micro_batchs_loss_is_read_twice(pool_of: Pools, mode: str, reads: list[int]) -> None:
    """Where a failed step would be run again, from the second step on."""
    assert pool_of(1).run(reads_of_losses, mode) == [reads]
