"""What the tests of streams run on ranks: a training as stock does it, and under plans whose copies and waits are watched."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from tests.transparency.trials import Outcome, Trial

SEED = 11

Fault = Callable[[], AbstractContextManager[Any]]
"""Something put wrong on purpose, on this rank."""


@dataclass
class Under:
    """A training under watch."""

    differing: list[str]
    """What is not equal to stock's in every bit."""
    races: list[str]
    """Accesses that do not wait for each other."""
    found: list[str]
    """What delays have shown."""
    moved: int
    """Copies on streams."""
    outcome: Outcome | None = None


def watched(
    rank: int, job: Job, plans: list[Plan], trial: Trial, logged: bool = False, fault: Fault = nullcontext
) -> list[Under]:
    """Stock, and each plan under watch. `logged`: each step is timed between barriers, as `--log-interval 1` does it."""
    from tests.instruments.groups import initialise
    from tests.instruments.streams import watched_streams
    from tests.transparency.trials import _outcome, train

    initialise(job)
    gc.collect()
    stock, seen = train(job, None, trial), []
    for number, plan in enumerate(plans):
        with watched_streams(seed=SEED + rank + 10 * number) as watch, ExitStack() as stack:
            stack.enter_context(fault())
            if logged:
                stack.enter_context(timed_between_barriers())
            outcome = _outcome(stock, train(job, plan, trial))
            seen.append(Under(outcome.differing, watch.races, watch.found, watch.device.moved, outcome))
    return seen


@contextmanager
def timed_between_barriers() -> Iterator[None]:
    """Every step is timed as Megatron's loop does it: barrier, synchronisation, step, barrier, synchronisation."""
    from megatron.core.timers import Timers

    from tests.instruments.replacing import replace
    from tests.instruments.training import Training

    timers, step = Timers(log_level=2, log_option="all"), Training.step

    def timed(*args: Any) -> Any:
        timers("step", log_level=0).start(barrier=True)
        losses = step(*args)
        timers("step").stop(barrier=True)
        assert timers("step").elapsed(barrier=True) > 0
        return losses

    with ExitStack() as undo:
        replace(undo, Training, "step", timed)
        yield


def without_flushes(rank: int, job: Job, how: dict[str, Any], plan: Plan | None, batches: int = 3) -> Under:
    """Training without flushes under watch, beside the version rule: under a plan, or without one."""
    from tests.double_buffered import on_ranks
    from tests.instruments.streams import watched_streams

    with watched_streams(seed=SEED + rank) as watch:
        if plan is None:
            differing = on_ranks.differing(rank, job, how, batches)
        else:
            [planned] = on_ranks.planned(rank, job, how, [plan], batches)
            differing = planned.differing
    return Under(differing, watch.races, watch.found, watch.device.moved)
