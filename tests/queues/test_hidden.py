"""Recomputations that run while a gradient is received are hidden with one hardware queue as with eight.

Interleaved schedules send a forward between the receive of a gradient and the wait for it, and double-buffered ones right before
the receive. NCCL has one stream for all messages of two ranks in a group. So the recomputation used to come behind a message that
waited behind another one in that stream, at the head of the only queue: it began when the gradient was there. Of two stages
cool-down's recomputations did, too, with any number of queues: they came behind a send that the other stage takes when it has
made the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.testbed.ranks import RankPool
from tests.double_buffered.test_plans import without_flushes
from tests.instruments.queues.hidden import hides
from tests.instruments.queues.log import Kernel, Log
from tests.instruments.queues.replay import replay
from tests.queues.on_ranks import Setting, named_recomputations
from tests.tiny_jobs import tiny_job
from tests.transparency.plans import plan_for, recomputable

Pools = Callable[[int], RankPool]
LAYOUTS = [
    pytest.param({"pipeline": 3, "layers": 3, "microbatches": 4}, {}, id="1F1B"),
    pytest.param({"pipeline": 3, "layers": 6, "layers_per_chunk": 1, "microbatches": 3}, {}, id="interleaved"),
    pytest.param({"pipeline": 2, "layers": 4, "layers_per_chunk": 1, "microbatches": 4}, {}, id="interleaved, two stages"),
    pytest.param(
        {"pipeline": 2, "tensor": 2, "layers": 4, "layers_per_chunk": 1, "microbatches": 4}, {}, id="interleaved, two stages, t=2"
    ),
    pytest.param({"pipeline": 3, "layers": 3, "microbatches": 3}, {"defers": True}, id="no flushes"),
]


@pytest.mark.parametrize(("layout", "how"), LAYOUTS)
def test_what_runs_while_a_gradient_is_received_is_hidden(pool_of: Pools, layout: dict[str, Any], how: dict[str, Any]) -> None:
    job = tiny_job("gpt", **layout)
    plan = plan_for(job, lambda _: recomputable(job))
    logs = pool_of(job.gpus).run(named_recomputations, job, Setting(plan=without_flushes(plan) if how else plan, **how))
    named = [(log.rank, name) for log in logs for name in recomputations_of(log)]
    assert any(name.endswith("for 0") for _, name in named), "in steady phases, too"
    for queues in (1, 8):
        assert replay(logs, queues).finished
        assert [each for each in named if not hides(logs, queues, *each)] == []


def recomputations_of(log: Log) -> list[str]:
    """Of the first step or two: each is looked at in a replay of its own."""
    names = [entry.name for entry in log.entries if isinstance(entry, Kernel) and entry.name.startswith("recompute of ")]
    return list(dict.fromkeys(names))[:6]
